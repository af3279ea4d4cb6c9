// A core's memory: contents in a file that is never mapped, addresses in a range nobody may touch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

namespace neuronsim {

// Tensors need pointers, so a PROT_NONE reservation gives out addresses: to dereference one on the
// host is SIGSEGV. What the "device" holds lies in a memfd, written and read by system calls only,
// so it is no part of the process's resident set.
class Hbm {
 public:
  void open(size_t capacity_bytes);

  void* allocate(size_t bytes);  // throws c10::OutOfMemoryError
  void release(void* address, size_t bytes);

  void write(void* device, const void* host, size_t bytes);
  void read(void* host, const void* device, size_t bytes) const;

  size_t capacity_bytes() const { return capacity_; }
  size_t used_bytes() const { return used_; }
  size_t peak_bytes() const { return peak_; }
  void reset_peak() { peak_ = used_; }

 private:
  size_t offset(const void* address) const { return static_cast<const char*>(address) - base_; }

  char* base_ = nullptr;
  int file_ = -1;
  size_t capacity_ = 0;
  size_t used_ = 0;
  size_t peak_ = 0;
  std::map<size_t, size_t> holes_;  // offset to size; no two touch
  std::mutex mutex_;
};

Hbm& hbm();

}  // namespace neuronsim
