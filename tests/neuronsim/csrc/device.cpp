// Allocator, hooks and device guard: what PyTorch asks of a PrivateUse1 backend.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <vector>

#include "hbm.h"

namespace neuronsim {

thread_local int Uncounted::depth = 0;

Counters& counters() {
  static Counters all;
  return all;
}

Cores& cores() {
  static Cores all;
  return all;
}

void Cores::check(int index) const {
  TORCH_CHECK_VALUE(index >= first && index < first + own, "Device index ", index,
                    " is out of range. Valid range is ", first, " to ", first + own - 1,
                    " for this process");
}

void Cores::set(int index) {
  check(index);
  current = index;
}

void Cores::assign(int index, int local_world) {
  first = index;
  own = 1;
  count = local_world;
  current = index;
  initialized = true;
}

namespace {

c10::Device here() { return {kNeuron, static_cast<c10::DeviceIndex>(cores().current.load())}; }

c10::Device exchange(c10::DeviceIndex index) {
  const auto before = here();
  if (index >= 0 && index != before.index()) cores().set(index);
  return before;
}

struct Block {
  void* address;
  size_t bytes;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  hbm().release(block->address, block->bytes);
  delete block;
}

class Allocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    cores().initialized = true;
    if (bytes == 0) return {nullptr, here()};
    void* address = hbm().allocate(bytes);
    return {address, new Block{address, bytes}, &release, here()};
  }

  void copy_data(void* target, const void* source, size_t bytes) const override {
    std::vector<char> buffer(std::min<size_t>(bytes, 1 << 20));
    for (size_t done = 0; done < bytes; done += buffer.size()) {
      const size_t n = std::min(buffer.size(), bytes - done);
      hbm().read(buffer.data(), static_cast<const char*>(source) + done, n);
      hbm().write(static_cast<char*>(target) + done, buffer.data(), n);
    }
  }
};

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return cores().count > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override { cores().initialized = true; }
  c10::DeviceIndex deviceCount() const override { return cores().count; }
  c10::DeviceIndex getCurrentDevice() const override { return here().index(); }
  void setCurrentDevice(c10::DeviceIndex index) const override { cores().set(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return exchange(index).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchange(index).index();
  }
  at::Device getDeviceFromPtr(void*) const override { return here(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static at::Generator generator = at::detail::createCPUGenerator();
    return generator;
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    auto larger = allocator()->allocate(bytes);
    allocator()->copy_data(larger.get(), impl->data_ptr().get(), std::min(bytes, impl->nbytes()));
    impl->set_data_ptr_noswap(std::move(larger));
    impl->set_nbytes(bytes);
  }
};

// Everything happens at once: there is one stream, and an event is over when it is recorded.
class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  static constexpr c10::DeviceType static_type = kNeuron;

  c10::DeviceType type() const override { return kNeuron; }
  c10::Device exchangeDevice(c10::Device device) const override { return exchange(device.index()); }
  c10::Device getDevice() const override { return here(); }
  void setDevice(c10::Device device) const override { exchange(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) cores().current = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return cores().count; }

  c10::Stream getStream(c10::Device device) const noexcept override { return only(device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return only(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return only(device);
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return only(device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    return only(stream.device());
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}

  void record(void** event, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    *event = const_cast<Guard*>(this);  // anything but null
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}

 private:
  static c10::Stream only(c10::Device device) {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
};

Allocator the_allocator;
REGISTER_ALLOCATOR(kNeuron, &the_allocator);
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace

c10::Allocator* allocator() { return &the_allocator; }

void register_hooks() { at::RegisterPrivateUse1HooksInterface(new Hooks); }

}  // namespace neuronsim
