#include "hbm.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace neuronsim {
namespace {

constexpr size_t kGranule = 256;  // the smallest piece that TorchNeuron's allocator hands out

size_t rounded(size_t bytes) { return (bytes + kGranule - 1) / kGranule * kGranule; }

}  // namespace

Hbm& hbm() {
  static auto* memory = new Hbm;  // outlives every tensor
  return *memory;
}

void Hbm::open(size_t capacity_bytes) {
  capacity_ = rounded(capacity_bytes);
  void* range = mmap(nullptr, capacity_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(range != MAP_FAILED, "neuronsim: cannot reserve addresses: ", std::strerror(errno));
  base_ = static_cast<char*>(range);
  file_ = memfd_create("neuronsim-hbm", MFD_CLOEXEC);
  TORCH_CHECK(file_ >= 0 && ftruncate(file_, capacity_) == 0,
              "neuronsim: cannot make the memory file: ", std::strerror(errno));
  holes_ = {{0, capacity_}};
}

void* Hbm::allocate(size_t bytes) {
  const size_t need = rounded(bytes);
  std::lock_guard lock(mutex_);
  auto hole = std::find_if(holes_.begin(), holes_.end(), [&](auto& h) { return h.second >= need; });
  TORCH_CHECK_WITH(OutOfMemoryError, hole != holes_.end(), "Failed to allocate ", bytes,
                   " bytes of HBM: capacity ", capacity_, ", in use ", used_);
  const auto [at, size] = *hole;
  holes_.erase(hole);
  if (size > need) holes_.emplace(at + need, size - need);
  used_ += need;
  peak_ = std::max(peak_, used_);
  return base_ + at;
}

void Hbm::release(void* address, size_t bytes) {
  const size_t at = offset(address);
  const size_t size = rounded(bytes);
  std::lock_guard lock(mutex_);
  // gives the host its memory back
  fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at, size);
  used_ -= size;
  auto hole = holes_.emplace(at, size).first;
  auto next = std::next(hole);
  if (next != holes_.end() && at + size == next->first) {
    hole->second += next->second;
    holes_.erase(next);
  }
  if (hole != holes_.begin()) {
    auto before = std::prev(hole);
    if (before->first + before->second == at) {
      before->second += hole->second;
      holes_.erase(hole);
    }
  }
}

void Hbm::write(void* device, const void* host, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    const ssize_t n = pwrite(file_, static_cast<const char*>(host) + done, bytes - done,
                             offset(device) + done);
    TORCH_CHECK(n > 0, "neuronsim: write to device memory: ", std::strerror(errno));
    done += n;
  }
}

void Hbm::read(void* host, const void* device, size_t bytes) const {
  for (size_t done = 0; done < bytes;) {
    const ssize_t n =
        pread(file_, static_cast<char*>(host) + done, bytes - done, offset(device) + done);
    TORCH_CHECK(n > 0, "neuronsim: read from device memory: ", std::strerror(errno));
    done += n;
  }
}

}  // namespace neuronsim
