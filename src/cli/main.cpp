#include <fcntl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "backend/cpu/cpu_backend.h"
#include "cli/commands.h"
#include "cli/failure.h"
#include "cli/stop_signals.h"
#include "core/nearest_name.h"

namespace {

// "unknown command", where CLI11 would only say that one is required.
std::string UnknownCommand(CLI::App& app) {
  const CLI::App* deepest = &app;
  while (!deepest->get_subcommands().empty()) deepest = deepest->get_subcommands().front();
  std::vector<std::string_view> names;
  for (const CLI::App* command : deepest->get_subcommands({})) {
    names.push_back(command->get_name());
  }
  const std::string unknown = app.remaining(true).front();
  return "unknown command " + unknown + ", did you mean " +
         std::string(terrace::NearestName(unknown, names)) + "?";
}

// --json is all there is to say; --json=no would be taken as well.
void TakeFlagsWithoutValues(CLI::App& app) {
  for (CLI::Option* option : app.get_options()) {
    if (option->get_items_expected_max() == 0) option->disable_flag_override();
  }
  for (CLI::App* command : app.get_subcommands({})) TakeFlagsWithoutValues(*command);
}

// Says of every option that has to be given that it has: CLI11 does so only where it is left to
// name the values.
class Help : public CLI::Formatter {
 public:
  std::string make_option_opts(const CLI::Option* option) const override {
    const std::string text = CLI::Formatter::make_option_opts(option);
    const bool marked = option->get_option_text().empty();
    return option->get_required() && !marked ? text + " REQUIRED" : text;
  }
};

// Options of earlier releases, accepted for one more.
struct RenamedOption {
  std::string_view command, old_name, new_name;
};
constexpr RenamedOption kRenamedOptions[] = {{"compare", "--out", "--output"}};

// Gives options their present names, with a notice.
void RenameOptions(std::vector<std::string>& arguments) {
  for (const RenamedOption& option : kRenamedOptions) {
    if (arguments.size() < 2 || arguments[1] != option.command) continue;
    for (std::string& argument : arguments) {
      const std::string_view name = std::string_view(argument).substr(0, argument.find('='));
      if (name != option.old_name) continue;
      argument.replace(0, name.size(), option.new_name);
      std::fprintf(stderr,
                   "notice: %s is called %s now; the next release will refuse the old name\n",
                   std::string(option.old_name).c_str(), std::string(option.new_name).c_str());
    }
  }
}

// Where a standard stream is closed, the next file that is opened would take its place, and what is
// printed would go into that file.
void OpenStandardStreams() {
  int opened = 0;
  while (opened >= 0 && opened <= STDERR_FILENO) opened = open("/dev/null", O_RDWR);
  if (opened >= 0) close(opened);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view command = argc > 1 ? argv[1] : "";
  if (command == "train" || command == "compare") terrace::HoldStopSignals();
  OpenStandardStreams();
  std::signal(SIGXFSZ, SIG_IGN);  // a file that may not grow fails like a full disk
  CLI::App app("Trains Mixture-of-Experts language models in little memory.", "terrace");
  app.set_version_flag("--version", "terrace " TERRACE_VERSION);
  app.formatter(std::make_shared<Help>());  // commands take it over
  app.require_subcommand(1);
  app.footer(
      "The environment's TERRACE_MAX_ISA=avx2, avx512 or avx512_bf16 caps the instruction set.");
  terrace::AddTrainCommand(app);
  terrace::AddPlanCommand(app);
  terrace::AddEvalCommand(app);
  terrace::AddGenerateCommand(app);
  terrace::AddCompareCommand(app);
  terrace::AddPoliciesCommand(app);
  terrace::AddPresetsCommand(app);
  terrace::AddTokenizerCommand(app);
  terrace::AddDataCommand(app);
  TakeFlagsWithoutValues(app);
  try {
    if (const char* isa = std::getenv("TERRACE_MAX_ISA")) terrace::CapInstructionSet(isa);
    std::vector<std::string> arguments(argv, argv + argc);
    RenameOptions(arguments);
    std::vector<const char*> texts;
    for (const std::string& argument : arguments) texts.push_back(argument.c_str());
    app.parse(static_cast<int>(texts.size()), texts.data());
  } catch (const CLI::Success& success) {  // --help, --version
    return app.exit(success);
  } catch (const CLI::RequiredError& error) {
    return terrace::ReportError(app.remaining(true).empty() ? error.what() : UnknownCommand(app));
  } catch (const CLI::ParseError& error) {
    return terrace::ReportError(error.what());
  } catch (const std::exception& error) {
    return terrace::Report(error);
  }
  return 0;
}
