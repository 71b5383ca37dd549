#include "core/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <utility>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#endif

namespace terrace {
namespace {

#if defined(NDEBUG)
constexpr int64_t kGuardBytes = 0;
#else
// Poisoned (under ASan) or merely unused bytes behind each tensor, so that a small overrun does
// not reach a neighbour's contents unseen.
constexpr int64_t kGuardBytes = Arena::kAlignment;
#endif

}  // namespace

std::string_view NameOf(Memory category) {
  static constexpr std::string_view kNames[] = {"weights", "optimizer", "gradients", "activations",
                                                "scratch"};
  return kNames[static_cast<int>(category)];
}

std::string TextOf(const Phase& phase) {
  const std::string_view part = phase.part;
  if (phase.layer >= 0) {
    return fmt::format("{} of layers.{}{}{}", phase.pass, phase.layer, part.empty() ? "" : "'s ",
                       part);
  }
  return part.empty() ? phase.pass : fmt::format("{} of the {}", phase.pass, part);
}

Arena::Arena(int64_t capacity_bytes)
    : capacity_bytes_(std::max(Aligned(capacity_bytes), kAlignment)) {
  void* mapping = mmap(nullptr, capacity_bytes_, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) {
    Fail("memory: cannot map {} bytes: {}", capacity_bytes_, std::strerror(errno));
  }
  // Huge pages spare the page walks of matrix products over gigabytes of weights; a kernel
  // without them ignores the advice.
  madvise(mapping, capacity_bytes_, MADV_HUGEPAGE);
  base_ = static_cast<std::byte*>(mapping);
  ASAN_POISON_MEMORY_REGION(base_, capacity_bytes_);
}

Arena Arena::Dry() { return Arena(); }

Arena::Arena(Arena&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)),
      capacity_bytes_(other.capacity_bytes_),
      near_bytes_(other.near_bytes_),
      far_bytes_(other.far_bytes_),
      ledger_(other.ledger_),
      phase_(other.phase_),
      watcher_(other.watcher_) {}

Arena::~Arena() {
  if (base_ == nullptr) return;
  ASAN_UNPOISON_MEMORY_REGION(base_, capacity_bytes_);
  munmap(base_, capacity_bytes_);
}

TensorView Arena::Allocate(Memory category, DType dtype, Shape shape, const char* name) {
  const int64_t used_bytes = shape.size() * BytesOf(dtype);
  const int64_t held_bytes = Aligned(used_bytes) + kGuardBytes;
  const int64_t free_bytes = capacity_bytes_ - near_bytes_ - far_bytes_;
  TERRACE_CHECK(held_bytes <= free_bytes, "{} ({}, {} {}) needs {} bytes, {} of {} are free", name,
                NameOf(category), NameOf(dtype), shape.ToString(), held_bytes, free_bytes,
                capacity_bytes_);
  TensorView view{nullptr, dtype, shape, name};
  const bool far = category == Memory::kScratch;
  if (base_ != nullptr) {
    view.data = far ? base_ + capacity_bytes_ - far_bytes_ - held_bytes : base_ + near_bytes_;
    ASAN_UNPOISON_MEMORY_REGION(view.data, used_bytes);
#if !defined(NDEBUG)
    std::memset(view.data, 0xff, used_bytes);  // NaN in every float type
#endif
  }
  (far ? far_bytes_ : near_bytes_) += held_bytes;

  const int index = static_cast<int>(category);
  ledger_.current_bytes[index] += held_bytes;
  ledger_.peak_bytes[index] = std::max(ledger_.peak_bytes[index], ledger_.current_bytes[index]);
  ledger_.total_bytes += held_bytes;
  if (ledger_.total_bytes > ledger_.total_peak_bytes) {
    ledger_.total_peak_bytes = ledger_.total_bytes;
    ledger_.at_peak_bytes = ledger_.current_bytes;
  }
  if (watcher_ != nullptr) watcher_->Allocated(*this, category, used_bytes, held_bytes, name);
  return view;
}

Arena::Frame::Frame(Arena& arena)
    : arena_(&arena),
      near_bytes_(arena.near_bytes_),
      far_bytes_(arena.far_bytes_),
      current_bytes_(arena.ledger_.current_bytes) {}

Arena::Frame::Frame(Frame&& other) noexcept
    : arena_(std::exchange(other.arena_, nullptr)),
      near_bytes_(other.near_bytes_),
      far_bytes_(other.far_bytes_),
      current_bytes_(other.current_bytes_) {}

Arena::Frame::~Frame() {
  if (arena_ == nullptr) return;
  Arena& arena = *arena_;
  if (arena.base_ != nullptr) {
    ASAN_POISON_MEMORY_REGION(arena.base_ + near_bytes_, arena.near_bytes_ - near_bytes_);
    ASAN_POISON_MEMORY_REGION(arena.base_ + arena.capacity_bytes_ - arena.far_bytes_,
                              arena.far_bytes_ - far_bytes_);
  }
  arena.near_bytes_ = near_bytes_;
  arena.far_bytes_ = far_bytes_;
  arena.ledger_.current_bytes = current_bytes_;
  arena.ledger_.total_bytes =
      std::accumulate(current_bytes_.begin(), current_bytes_.end(), int64_t{0});
  if (arena.watcher_ != nullptr) arena.watcher_->Released(near_bytes_, far_bytes_);
}

}  // namespace terrace
