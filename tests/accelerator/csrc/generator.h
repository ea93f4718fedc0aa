// Random numbers of a device.
#pragma once

#include <ATen/core/Generator.h>

#include "streams.h"

namespace pretend {

const at::Generator& default_generator(Index device);
at::Generator new_generator(Index device);
at::Generator drawn_from(const at::Generator& generator);  // the CPU's generator that draws its numbers

}  // namespace pretend
