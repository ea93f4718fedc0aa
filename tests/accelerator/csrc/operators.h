// Operators: copies, what only looks at memory, and all others by the CPU.
#pragma once

#include <ATen/core/Tensor.h>

namespace pretend {

at::Tensor on_cpu(const at::Tensor& tensor);  // the same memory, as a tensor of the CPU
void copy_now(const at::Tensor& to, const at::Tensor& from);  // at once, of tensors on_cpu

}  // namespace pretend
