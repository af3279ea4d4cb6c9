// What one process knows of its cores, and what was copied.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <atomic>
#include <cstdint>

namespace neuronsim {

constexpr auto kNeuron = c10::DeviceType::PrivateUse1;

// Bytes, since the last reset. A loader that puts weights straight onto the core leaves staged, cast
// and bounce at zero.
struct Counters {
  std::atomic<int64_t> h2d{0};     // all that went from host to device
  std::atomic<int64_t> staged{0};  // host copies made because source or target was strided
  std::atomic<int64_t> cast{0};    // host copies made because the dtypes differed
  std::atomic<int64_t> bounce{0};  // host buffers of asynchronous and of one-element copies
  std::atomic<int64_t> d2h{0};
};
Counters& counters();

// While one lives, copies of its thread are the simulator's own and are not counted: operators run
// on the CPU, collectives through gloo.
class Uncounted {
 public:
  Uncounted() { ++depth; }
  ~Uncounted() { --depth; }
  Uncounted(const Uncounted&) = delete;
  Uncounted& operator=(const Uncounted&) = delete;
  static bool active() { return depth > 0; }
  static thread_local int depth;
};

// Cores of this process: all visible ones, or after `assign` the one that the process group gave it.
struct Cores {
  std::atomic<bool> initialized{false};  // any tensor on the device starts the runtime
  std::atomic<int> current{0};
  int first = 0;
  int own = 1;    // first, first + 1, ...: set_device of another raises
  int count = 1;  // what device_count says

  void check(int index) const;
  void set(int index);
  void assign(int index, int local_world);
};
Cores& cores();

c10::Allocator* allocator();
void register_hooks();

}  // namespace neuronsim
