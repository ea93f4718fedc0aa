// Devices, their streams and events.
//
// What a stream was given is done as late as it may be: when somebody waits for it, or when the same stream is given
// an operator, which needs what came before. A program that forgets to wait reads old numbers each time, and not only
// where it loses a race.
#pragma once

#include <functional>

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

namespace pretend {

using Index = c10::DeviceIndex;
using Count = uint64_t;

constexpr auto kType = c10::DeviceType::PrivateUse1;

// Devices.
Index device_count() noexcept;                  // those that PRETEND_VISIBLE_DEVICES names, as "0,2"
int physical(Index device);                     // the number of a visible device among all of the machine
Index current_device() noexcept;                // of this thread
void set_device(Index device);                  // an error for an index that is not there
void unchecked_set_device(Index device) noexcept;
bool is_initialized() noexcept;                 // whether this process has used a device, and may go on with it
bool is_in_bad_fork() noexcept;                 // whether it was forked from one that had
void call_at_first_use(std::function<void()> call);
void use();                                     // from now on it has; an error where it was forked

// Streams. Number 0 of each device is its default one.
c10::Stream current_stream(Index device);
c10::Stream exchange_stream(c10::Stream stream);
c10::Stream new_stream(Index device);

struct Task {
  std::function<void()> run;
  std::function<bool()> is_ready = {};          // whether it would end at once; none: always
};
Count give(c10::Stream stream, Task task);      // returns how many the stream was given until now
Count given(c10::Stream stream);
Count done(c10::Stream stream);
void let_wait(c10::Stream stream, c10::Stream other, Count count);
void finish(c10::Stream stream, Count count);   // do what it was given up to there; raises what a task raises
void finish(c10::Stream stream);
void finish_device(Index device);
bool poll(c10::Stream stream, Count count);     // whether it is done; if not, one task is done, if that does not wait

}  // namespace pretend
