// First, as Python wants.
#include <Python.h>

#include "streams.h"

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>
#include <vector>

#include <pthread.h>

#include <c10/util/Exception.h>

namespace pretend {
namespace {

struct Item {
  Task task;
  std::optional<std::pair<c10::Stream, Count>> waits_for;
};

struct Queue {
  std::deque<Item> items;
  Count given = 0, done = 0;
  bool is_running = false;
  std::exception_ptr failure;  // the first, which all who wait for the stream get from then on
};

// Never destroyed: tensors may be freed after the end of main.
struct Machine {
  std::mutex lock;
  std::condition_variable changed;
  std::map<std::pair<Index, c10::StreamId>, Queue> queues;
  c10::StreamId streams = 0;
  std::atomic<bool> is_initialized = false, is_in_bad_fork = false;
  std::once_flag first_use;
  std::vector<std::function<void()>> at_first_use;
};

Machine& machine() {
  static auto* made = new Machine();
  return *made;
}

thread_local Index current = 0;
thread_local std::map<Index, c10::StreamId> current_streams;

std::vector<int> visible() {
  std::vector<int> found;
  const char* asked = std::getenv("PRETEND_VISIBLE_DEVICES");
  std::stringstream words(asked == nullptr ? "" : asked);
  for (std::string word; std::getline(words, word, ',');) {
    found.push_back(std::stoi(word));
  }
  return found;
}

const std::vector<int>& devices() {
  static const auto* made = new std::vector<int>(visible());
  return *made;
}

Queue& queue(c10::Stream stream) {
  return machine().queues[{stream.device_index(), stream.id()}];
}

void check(Index device) {
  TORCH_CHECK(device >= 0 && device < device_count(), "pretend: invalid device ordinal ", int(device), " of ",
              int(device_count()));
}

}  // namespace

Index device_count() noexcept {
  return static_cast<Index>(devices().size());
}

int physical(Index device) {
  check(device);
  return devices()[device];
}

Index current_device() noexcept {
  return current;
}

void set_device(Index device) {
  check(device);
  use();
  current = device;
}

void unchecked_set_device(Index device) noexcept {
  current = device;
}

bool is_initialized() noexcept {
  return machine().is_initialized && !machine().is_in_bad_fork;
}

bool is_in_bad_fork() noexcept {
  return machine().is_in_bad_fork;
}

void call_at_first_use(std::function<void()> call) {
  if (is_initialized()) {
    call();
  } else {
    machine().at_first_use.push_back(std::move(call));
  }
}

static void refuse_forked() {
  TORCH_CHECK(!machine().is_in_bad_fork,
              "Cannot re-initialize pretend in forked subprocess: use the 'spawn' start method.");
}

void use() {
  auto& all = machine();
  refuse_forked();
  if (!all.is_initialized) {
    TORCH_CHECK(device_count() > 0, "No pretended devices are available: PRETEND_VISIBLE_DEVICES names none.");
    std::call_once(all.first_use, [&all] {
      // The lock is held meanwhile, since a fork may free tensors: no other thread is there that would let go of it.
      pthread_atfork([] { machine().lock.lock(); }, [] { machine().lock.unlock(); }, [] {
        machine().is_in_bad_fork = true;
        machine().lock.unlock();
      });
      all.is_initialized = true;
      for (auto& call : all.at_first_use) {
        call();
      }
    });
  }
}

c10::Stream current_stream(Index device) {
  check(device);
  auto found = current_streams.find(device);
  auto id = found == current_streams.end() ? 0 : found->second;
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), id);
}

c10::Stream exchange_stream(c10::Stream stream) {
  auto before = current_stream(stream.device_index());
  current_streams[stream.device_index()] = stream.id();
  return before;
}

c10::Stream new_stream(Index device) {
  check(device);
  use();
  std::lock_guard<std::mutex> hold(machine().lock);
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), ++machine().streams);
}

static Count put(c10::Stream stream, Item item) {
  std::lock_guard<std::mutex> hold(machine().lock);
  auto& mine = queue(stream);
  mine.items.push_back(std::move(item));
  return ++mine.given;
}

Count give(c10::Stream stream, Task task) {
  return put(stream, {std::move(task), std::nullopt});
}

Count given(c10::Stream stream) {
  std::lock_guard<std::mutex> hold(machine().lock);
  return queue(stream).given;
}

Count done(c10::Stream stream) {
  std::lock_guard<std::mutex> hold(machine().lock);
  return queue(stream).done;
}

void let_wait(c10::Stream stream, c10::Stream other, Count count) {
  if (stream != other) {
    put(stream, {{}, std::make_pair(other, count)});
  }
}

// Whoever waits lets other threads have Python: a task may free a tensor that Python knows, or wait for a thread of
// gloo's that does. Some callers hold it, as Storage.resize_() and Event.query(). To be made before a lock is taken.
struct WithoutGil {
  PyThreadState* state = Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  ~WithoutGil() {
    if (state != nullptr) {
      PyEval_RestoreThread(state);
    }
  }
};

// Does the first task of a queue, whose lock is held; the lock is not held meanwhile.
static void run_first(Queue& mine, std::unique_lock<std::mutex>& hold) {
  auto task = std::move(mine.items.front().task);
  mine.items.pop_front();
  mine.is_running = true;
  hold.unlock();
  std::exception_ptr failure;
  try {
    task.run();
  } catch (...) {
    failure = std::current_exception();
  }
  task = {};  // which may free tensors, and so give tasks
  hold.lock();
  mine.is_running = false;
  mine.failure = mine.failure ? mine.failure : failure;
  mine.done++;
  machine().changed.notify_all();
}

// Takes the first item of a queue, whose lock is held, and which waited for another that is there.
static void pass_wait(Queue& mine, const Queue& other) {
  mine.items.pop_front();
  mine.failure = mine.failure ? mine.failure : other.failure;
  mine.done++;
  machine().changed.notify_all();
}

void finish(c10::Stream stream, Count count) {
  refuse_forked();  // a task may be another thread's, which is not there
  WithoutGil free;
  auto& all = machine();
  std::unique_lock<std::mutex> hold(all.lock);
  auto& mine = queue(stream);
  while (mine.done < count) {
    if (mine.is_running) {
      all.changed.wait(hold);
    } else if (auto wait = mine.items.front().waits_for; !wait) {
      run_first(mine, hold);
    } else if (queue(wait->first).done >= wait->second) {
      pass_wait(mine, queue(wait->first));
    } else {
      hold.unlock();
      try {
        finish(wait->first, wait->second);
      } catch (...) {  // which that queue keeps
      }
      hold.lock();
    }
  }
  if (mine.failure) {
    std::rethrow_exception(mine.failure);
  }
}

void finish(c10::Stream stream) {
  finish(stream, given(stream));
}

void finish_device(Index device) {
  std::vector<c10::StreamId> ids;
  {
    std::lock_guard<std::mutex> hold(machine().lock);
    for (auto& [key, queue] : machine().queues) {
      if (key.first == device) {
        ids.push_back(key.second);
      }
    }
  }
  for (auto id : ids) {
    finish(c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), id));
  }
}

bool poll(c10::Stream stream, Count count) {
  refuse_forked();
  WithoutGil free;
  auto& all = machine();
  std::unique_lock<std::mutex> hold(all.lock);
  auto& mine = queue(stream);
  if (mine.done >= count || mine.is_running) {
    return mine.done >= count;
  }
  auto& first = mine.items.front();
  if (first.waits_for) {
    auto wait = first.waits_for;
    hold.unlock();
    bool is_over = poll(wait->first, wait->second);
    hold.lock();
    if (is_over && !mine.is_running && !mine.items.empty() && mine.items.front().waits_for == wait) {
      pass_wait(mine, queue(wait->first));  // and no more than this: what comes after it may take its time
    }
  } else if (!first.task.is_ready || first.task.is_ready()) {
    run_first(mine, hold);
  }
  return false;
}

}  // namespace pretend
