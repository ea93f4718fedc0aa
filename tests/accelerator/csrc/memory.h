// The devices' memory, which is the host's, and pinned memory.
#pragma once

#include <c10/core/Allocator.h>

#include "streams.h"

namespace pretend {

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* pointer);
void record_stream(const c10::DataPtr& data, c10::Stream stream);
size_t memory_allocated(Index device);
size_t memory_total();  // of each device: PRETEND_MEMORY, in bytes

}  // namespace pretend
