#include "train/evaluate.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "data/batches.h"
#include "train/step.h"

namespace terrace {

namespace {

EvaluationBatches BatchesOf(const Dataset& dataset, const EvaluationShape& shape) {
  // No more than the data has: the product below could overflow.
  const int64_t max_batches =
      std::min(shape.max_batches, dataset.size() / (shape.sequences * shape.length) + 1);
  return {dataset, shape.sequences, shape.length, max_batches * shape.sequences};
}

}  // namespace

Evaluation Evaluate(Model& model, const Dataset& dataset, const EvaluationShape& shape) {
  const EvaluationBatches batches = BatchesOf(dataset, shape);
  const Arena::Frame frame(model.backend().arena());
  const MicroBatch batch =
      AllocateMicroBatches(model.backend().arena(), 1, shape.sequences, shape.length)[0];
  const std::span<int32_t> targets = batch.targets.span<int32_t>();
  std::vector<int64_t> counts(static_cast<size_t>(dataset.vocab_size()));
  double loss = 0;
  for (int64_t index = 0; index < batches.batches(); ++index) {
    batches.Read(index, batch.inputs.span<int32_t>(), targets);
    for (int32_t target : targets) {
      if (target != kIgnoredTarget) ++counts[static_cast<size_t>(target)];
    }
    loss += ForwardLoss(model, batch);
  }
  Evaluation evaluation;
  evaluation.tokens = batches.targets();
  evaluation.loss = loss / static_cast<double>(evaluation.tokens);
  evaluation.perplexity = std::exp(evaluation.loss);
  evaluation.unigram_entropy = UnigramEntropy(counts);
  return evaluation;
}

void CheckEvaluationData(const Dataset& dataset, const EvaluationShape& shape) {
  const EvaluationBatches batches = BatchesOf(dataset, shape);
  std::vector<int32_t> inputs(static_cast<size_t>(shape.sequences * shape.length));
  std::vector<int32_t> targets(inputs.size());
  for (int64_t i = 0; i < batches.batches(); ++i) batches.Read(i, inputs, targets);
}

void PlanEvaluation(Model& model, const EvaluationShape& shape) {
  const Arena::PhaseScope phase(model.backend().arena(), Phase{"evaluation"});
  const Arena::Frame frame(model.backend().arena());
  ForwardLoss(model,
              AllocateMicroBatches(model.backend().arena(), 1, shape.sequences, shape.length)[0]);
}

}  // namespace terrace
