// The commands of the program. Each is added to the application with its options, and runs when it
// is parsed; errors are thrown as Error, which main turns into one line and exit code 1.
#pragma once

namespace CLI {
class App;
}

namespace terrace {

void AddTrainCommand(CLI::App& app);
void AddPlanCommand(CLI::App& app);
void AddEvalCommand(CLI::App& app);
void AddGenerateCommand(CLI::App& app);
void AddCompareCommand(CLI::App& app);
void AddPoliciesCommand(CLI::App& app);
void AddPresetsCommand(CLI::App& app);
void AddTokenizerCommand(CLI::App& app);  // tokenizer train|encode|decode
void AddDataCommand(CLI::App& app);       // data prepare|check

}  // namespace terrace
