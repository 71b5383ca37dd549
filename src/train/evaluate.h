// Loss on text that was not trained on.
#pragma once

#include <cstdint>

#include "data/dataset.h"
#include "model/model.h"

namespace terrace {

struct Evaluation {
  int64_t tokens = 0;          // with a target
  double loss = 0;             // mean cross-entropy, in nats
  double perplexity = 0;       // exp(loss)
  double unigram_entropy = 0;  // of the same targets, in nats: what ignoring context can reach
};

// How a dataset is cut: B sequences of T tokens a batch, the first `max_batches` of them (fewer
// when the dataset has fewer).
struct EvaluationShape {
  int64_t sequences = 1;
  int64_t length = 1;
  int64_t max_batches = 1;
};

// Always the same batches for the same arguments.
Evaluation Evaluate(Model& model, const Dataset& dataset, const EvaluationShape& shape);

// Reads all that Evaluate is going to read: an error in it should not wait for the first
// evaluation.
void CheckEvaluationData(const Dataset& dataset, const EvaluationShape& shape);

// Takes the memory that Evaluate takes, for a model on a dry backend.
void PlanEvaluation(Model& model, const EvaluationShape& shape);

}  // namespace terrace
