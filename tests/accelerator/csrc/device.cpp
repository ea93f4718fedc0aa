// What torch asks of a device: its guard, its hooks, its generators.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "generator.h"
#include "memory.h"

namespace pretend {
namespace {

using Clock = std::chrono::steady_clock;

struct Event {
  c10::Stream stream;
  Count count;
  std::shared_ptr<Clock::time_point> time;
};

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kType;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return c10::Device(kType, current_device());
  }
  void setDevice(c10::Device device) const override {
    if (device.index() != current_device()) {
      set_device(device.index());
    }
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    unchecked_set_device(device.index());
  }
  c10::Stream getStream(c10::Device device) const override {
    return current_stream(device.has_index() ? device.index() : current_device());
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return new_stream(device.has_index() ? device.index() : current_device());
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return new_stream(device.has_index() ? device.index() : current_device());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return exchange_stream(stream);
  }
  bool queryStream(const c10::Stream& stream) const override {
    return poll(stream, given(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    finish(stream);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    finish_device(device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data, stream);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    auto time = std::make_shared<Clock::time_point>();
    auto count = give(stream, {[time] { *time = Clock::now(); }});
    delete static_cast<Event*>(*event);
    *event = new Event{stream, count, time};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (auto* known = static_cast<Event*>(event)) {
      let_wait(stream, known->stream, known->count);
    }
  }
  bool queryEvent(void* event) const override {
    auto* known = static_cast<Event*>(event);
    return known == nullptr || poll(known->stream, known->count);
  }
  void synchronizeEvent(void* event) const override {
    if (auto* known = static_cast<Event*>(event)) {
      finish(known->stream, known->count);
    }
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    auto *begin = static_cast<Event*>(first), *end = static_cast<Event*>(second);
    return std::chrono::duration<double, std::milli>(*end->time - *begin->time).count();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return device_count();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Draws what a CPU's generator draws, from another seed than was given: a device's numbers are not the CPU's.
struct Generator final : public c10::GeneratorImpl {
  explicit Generator(Index device)
      : c10::GeneratorImpl(c10::Device(kType, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(at::detail::createCPUGenerator()) {
    set_current_seed(c10::default_rng_seed_val);
  }
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    inner.set_current_seed(seed ^ 0x5DEECE66DULL);
  }
  uint64_t current_seed() const override {
    return seed_;
  }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_offset(uint64_t) override {
    TORCH_CHECK(false, "pretend's generator has no offset");
  }
  uint64_t get_offset() const override {
    TORCH_CHECK(false, "pretend's generator has no offset");
  }
  void set_state(const c10::TensorImpl& state) override {
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->set_state(*get_state());
    copy->seed_ = seed_;
    return copy;
  }

  at::Generator inner;
  uint64_t seed_ = 0;
};

struct Hooks final : public at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return device_count() > 0;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return is_initialized();
  }
  void init() const override {
    use();
  }
  c10::DeviceIndex deviceCount() const override {
    return device_count();
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    set_device(device);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current_device();
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = current_device();
    set_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? current_device() : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device < 0 ? current_device() : device);
  }
  bool isPinnedPtr(const void* pointer) const override {
    return is_pinned(pointer);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto kept = std::min(bytes, storage.nbytes());
    c10::DeviceGuard guard(storage.device());
    auto data = device_allocator()->allocate(bytes);
    finish(current_stream(current_device()));
    if (kept > 0) {
      std::memcpy(data.mutable_get(), storage.data(), kept);
    }
    storage.set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

}  // namespace

const at::Generator& default_generator(Index device) {
  static auto* made = [] {
    auto* all = new std::vector<at::Generator>();
    for (Index each = 0; each < device_count(); each++) {
      all->push_back(new_generator(each));
    }
    return all;
  }();
  physical(device);
  return (*made)[device];
}

at::Generator new_generator(Index device) {
  physical(device);
  return at::make_generator<Generator>(device);
}

at::Generator drawn_from(const at::Generator& generator) {
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->inner;
}

// After all others of this file.
static const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

}  // namespace pretend
