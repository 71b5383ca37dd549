#include "support/program.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <optional>
#include <stdexcept>
#include <utility>

#include "core/atomic_file.h"
#include "support/file_size_limit.h"

namespace terrace {
namespace {

// A new file, so that no pipe can fill up while nobody reads.
std::filesystem::path NewFile() {
  std::string pattern = (std::filesystem::temp_directory_path() / "terrace-out-XXXXXX").string();
  const int descriptor = mkstemp(pattern.data());
  if (descriptor < 0) throw std::runtime_error("mkstemp failed");
  close(descriptor);
  return pattern;
}

}  // namespace

Program::Program(std::vector<std::string> arguments, const Options& options)
    : output_(NewFile()), errors_(NewFile()) {
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  pid_ = fork();
  if (pid_ < 0) throw std::runtime_error("fork failed");
  if (pid_ > 0) return;

  for (const std::string& variable : options.environment) {
    const size_t equals = variable.find('=');
    setenv(variable.substr(0, equals).c_str(), variable.substr(equals + 1).c_str(), 1);
  }
  dup2(open(output_.c_str(), O_WRONLY), STDOUT_FILENO);
  dup2(open(errors_.c_str(), O_WRONLY), STDERR_FILENO);
  if (!options.folder.empty() && chdir(options.folder.c_str()) != 0) _exit(126);
  std::optional<FileSizeLimit> limit;  // the new program inherits it
  if (options.max_file_bytes >= 0) limit.emplace(static_cast<rlim_t>(options.max_file_bytes));
  if (options.pending_signal != 0) {  // both outlive exec
    sigset_t held;
    sigemptyset(&held);
    sigaddset(&held, options.pending_signal);
    sigprocmask(SIG_BLOCK, &held, nullptr);
    kill(getpid(), options.pending_signal);
  }
  execv(argv[0], argv.data());
  _exit(127);
}

Program::~Program() {
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  std::error_code ignored;
  std::filesystem::remove(output_, ignored);
  std::filesystem::remove(errors_, ignored);
}

void Program::Send(int signal) const { kill(pid_, signal); }

ProgramResult Program::Wait() {
  int status = 0;
  rusage usage = {};
  wait4(std::exchange(pid_, -1), &status, 0, &usage);
  ProgramResult result;
  result.peak_resident_bytes = int64_t{usage.ru_maxrss} * 1024;
  if (WIFEXITED(status)) result.exit_code = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) result.signal = WTERMSIG(status);
  result.output = ReadFile(output_);
  result.errors = ReadFile(errors_);
  return result;
}

}  // namespace terrace
