#include "memory.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include <pthread.h>

#include <c10/util/Exception.h>

namespace pretend {
namespace {

constexpr size_t kLine = 512;

struct Block {
  char* start;
  size_t size;
  c10::Stream stream;  // that was the current one
  std::vector<c10::Stream> users = {};  // others, by record_stream
};

struct Memory {
  std::mutex lock;
  std::map<std::tuple<Index, c10::StreamId, size_t>, std::vector<char*>> free;
  std::map<char*, size_t> pinned;
  std::map<Index, size_t> allocated;
};

Memory& memory() {
  static auto* made = new Memory();  // never destroyed, as the machine
  return *made;
}

// As the machine's lock, for forks.
const int registered = pthread_atfork([] { memory().lock.lock(); }, [] { memory().lock.unlock(); },
                                      [] { memory().lock.unlock(); });

void give_back(Block* block) {
  std::lock_guard<std::mutex> hold(memory().lock);
  auto key = std::make_tuple(block->stream.device_index(), block->stream.id(), block->size);
  memory().free[key].push_back(block->start);
  memory().allocated[block->stream.device_index()] -= block->size;
  delete block;
}

// Freed memory goes to the next who asks on the same stream, as those of real devices do. Whoever still reads it on
// another stream, without record_stream or a wait, reads NaN from then on.
void free_block(void* given_block) {
  auto* block = static_cast<Block*>(given_block);
  auto *start = block->start;
  auto size = block->size;
  auto stream = block->stream;
  for (auto user : block->users) {
    let_wait(stream, user, given(user));
  }
  if (block->users.empty()) {
    give(stream, {[start, size] { std::memset(start, 0xFF, size); }});
    give_back(block);
  } else {
    give(stream, {[block] { std::memset(block->start, 0xFF, block->size); give_back(block); }});
  }
}

class DeviceAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    use();
    auto device = current_device();
    auto place = c10::Device(kType, device);
    if (bytes == 0) {
      return {nullptr, nullptr, &free_block, place};
    }
    auto stream = current_stream(device);
    auto size = (bytes + kLine - 1) / kLine * kLine;
    std::lock_guard<std::mutex> hold(memory().lock);
    auto& allocated = memory().allocated[device];
    TORCH_CHECK_WITH(OutOfMemoryError, allocated + size <= memory_total(), "pretend out of memory. Tried to allocate ",
                     size, " bytes. Device ", int(device), " has ", memory_total(), " of which ", allocated,
                     " are in use.");
    allocated += size;
    auto& free = memory().free[std::make_tuple(device, stream.id(), size)];
    char* start = nullptr;
    if (free.empty()) {
      start = static_cast<char*>(std::aligned_alloc(kLine, size));
      std::memset(start, 0xFF, size);
    } else {
      start = free.back();
      free.pop_back();
    }
    return {start, new Block{start, size, stream}, &free_block, place};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }

  void copy_data(void* dest, const void* src, std::size_t count) const override {
    finish(current_stream(current_device()));
    std::memcpy(dest, src, count);
  }
};

void free_pinned(void* start) {
  {
    std::lock_guard<std::mutex> hold(memory().lock);
    memory().pinned.erase(static_cast<char*>(start));
  }
  std::free(start);
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    use();
    auto size = (bytes + kLine) / kLine * kLine;
    auto* start = static_cast<char*>(std::aligned_alloc(kLine, size));
    std::lock_guard<std::mutex> hold(memory().lock);
    memory().pinned[start] = size;
    return {start, start, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &free_pinned;
  }

  void copy_data(void* dest, const void* src, std::size_t count) const override {
    std::memcpy(dest, src, count);
  }
};

DeviceAllocator on_device;
PinnedAllocator pinned;

}  // namespace

REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &on_device);

c10::Allocator* device_allocator() {
  return &on_device;
}

c10::Allocator* pinned_allocator() {
  return &pinned;
}

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> hold(memory().lock);
  auto& all = memory().pinned;
  auto after = all.upper_bound(static_cast<char*>(const_cast<void*>(pointer)));
  if (after == all.begin()) {
    return false;
  }
  auto [start, size] = *--after;
  return pointer < start + size;
}

void record_stream(const c10::DataPtr& data, c10::Stream stream) {
  auto* block = static_cast<Block*>(data.get_context());
  if (block != nullptr && data.get_deleter() == &free_block && stream != block->stream) {
    std::lock_guard<std::mutex> hold(memory().lock);
    block->users.push_back(stream);
  }
}

size_t memory_allocated(Index device) {
  std::lock_guard<std::mutex> hold(memory().lock);
  return memory().allocated[device];
}

size_t memory_total() {
  static const char* asked = std::getenv("PRETEND_MEMORY");
  return asked == nullptr ? size_t(1) << 30 : std::stoull(asked);
}

}  // namespace pretend
