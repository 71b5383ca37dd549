// One arena per device holds everything whose size depends on the model or the batch, and its
// ledger counts it to the byte.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "core/tensor.h"

namespace terrace {

// What memory is held for. kScratch dies within the operation that asked for it; kActivations
// live from forward to backward; the others for the whole run.
enum class Memory : uint8_t { kWeights, kOptimizer, kGradients, kActivations, kScratch };
inline constexpr int kMemoryCategories = 5;
using CategoryBytes = std::array<int64_t, kMemoryCategories>;
std::string_view NameOf(Memory category);

// Bytes held now and at most, per category and together. The peak of the total is not the sum
// of the categories' peaks: they occur at different moments.
struct Ledger {
  CategoryBytes current_bytes{};
  CategoryBytes peak_bytes{};
  // What each category held at the moment of the total's peak.
  CategoryBytes at_peak_bytes{};
  int64_t total_bytes = 0;
  int64_t total_peak_bytes = 0;
};

// What the program is at while it takes memory, for reports. Texts live as long as the program.
struct Phase {
  const char* pass = "setting up";  // "forward"
  const char* part = "";            // "attention"; empty: all of it
  int64_t layer = -1;               // -1: none

  bool operator==(const Phase&) const = default;
};
// "backward of layers.1's feed-forward", "forward of the embedding"
std::string TextOf(const Phase& phase);

class Arena;

// Is told of everything that an arena gives and takes back.
class ArenaWatcher {
 public:
  virtual ~ArenaWatcher() = default;
  // `used_bytes` were asked for and `held_bytes` are in the ledger now.
  virtual void Allocated(const Arena& arena, Memory category, int64_t used_bytes,
                         int64_t held_bytes, const char* name) = 0;
  // The two stacks (scratch is the far one) hold no more than this now.
  virtual void Released(int64_t near_bytes, int64_t far_bytes) = 0;
};

// Two stacks that grow towards each other in one mapping: scratch from the far end, everything
// else from the near end. Allocation order is release order reversed, within each stack.
//
// A dry arena gives views without memory and keeps the same ledger: the peak of a dry run is the
// capacity that the real run needs, exactly. Memory comes from the kernel page by page as it is
// first touched, so resident memory follows use. Contents are undefined (NaN in debug builds).
// Not thread-safe: one thread drives a device.
class Arena {
 public:
  // Every allocation is a multiple of this and aligned to it, in bytes.
  static constexpr int64_t kAlignment = 64;
  static constexpr int64_t Aligned(int64_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  // Throws Error when the mapping is refused.
  explicit Arena(int64_t capacity_bytes);
  static Arena Dry();
  ~Arena();
  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&&) = delete;

  bool dry() const { return base_ == nullptr; }
  int64_t capacity_bytes() const { return capacity_bytes_; }
  const Ledger& ledger() const { return ledger_; }

  const Phase& phase() const { return phase_; }
  // Null: nobody. The watcher must outlive what it watches.
  void Watch(ArenaWatcher* watcher) { watcher_ = watcher; }

  // Throws InternalError, naming `name` and the bytes missing, when the capacity, which is planned,
  // does not suffice. `name` must outlive the view.
  TensorView Allocate(Memory category, DType dtype, Shape shape, const char* name);

  // Gives back, when it goes out of scope, all that was allocated after it was made.
  class Frame {
   public:
    explicit Frame(Arena& arena);
    ~Frame();
    Frame(Frame&& other) noexcept;
    Frame& operator=(Frame&&) = delete;

   private:
    Arena* arena_;
    int64_t near_bytes_;
    int64_t far_bytes_;
    CategoryBytes current_bytes_;
  };

  // Names what happens until it goes out of scope.
  class PhaseScope {
   public:
    PhaseScope(Arena& arena, const Phase& phase) : arena_(arena), before_(arena.phase_) {
      arena.phase_ = phase;
    }
    // A part of what is under way.
    PhaseScope(Arena& arena, const char* part)
        : PhaseScope(arena, {arena.phase_.pass, part, arena.phase_.layer}) {}
    ~PhaseScope() { arena_.phase_ = before_; }
    PhaseScope(const PhaseScope&) = delete;

   private:
    Arena& arena_;
    Phase before_;
  };

 private:
  Arena() = default;

  std::byte* base_ = nullptr;
  int64_t capacity_bytes_ = INT64_MAX;
  int64_t near_bytes_ = 0;
  int64_t far_bytes_ = 0;
  Ledger ledger_;
  Phase phase_;
  ArenaWatcher* watcher_ = nullptr;
};

}  // namespace terrace
