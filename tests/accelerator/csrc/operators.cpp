#include "operators.h"

#include <cstdlib>
#include <set>
#include <string>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/OpMathType.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Reduction.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "generator.h"
#include "memory.h"

namespace pretend {

// Below autograd, autocast and Python's modes.
struct Plain {
  c10::impl::ExcludeDispatchKeyGuard no_python{c10::DispatchKeySet(
      {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::PythonDispatcher})};
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
  at::AutoDispatchBelowADInplaceOrView below;
};

at::Tensor on_cpu(const at::Tensor& tensor) {
  if (tensor.device().type() != kType) {
    return tensor;
  }
  Plain plain;
  auto needed = tensor.numel() == 0 ? 0 : at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), tensor.dtype().itemsize(), tensor.storage_offset());
  TORCH_CHECK(tensor.storage().nbytes() >= needed, "pretend: illegal memory access: a tensor of ", needed,
              " bytes in a storage of ", tensor.storage().nbytes());
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  auto storage = tensor.storage();  // which keeps the memory
  auto view = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), [storage](void*) {}, options);
  if (tensor.is_conj()) {
    view._set_conj(true);
  }
  if (tensor.is_neg()) {
    view._set_neg(true);
  }
  return view;
}

void copy_now(const at::Tensor& to, const at::Tensor& from) {
  Plain plain;
  at::Tensor(to).copy_(from);
}

namespace {

bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

thread_local bool in_fallback = false;

struct InFallback {
  bool before = std::exchange(in_fallback, true);
  ~InFallback() {
    in_fallback = before;
  }
};

// Copies are given to the current stream of the device. Those that a program may take for done when they are asked for
// are done then: between a device and memory that is not pinned.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) {
    return to;
  }
  auto device = is_ours(to) ? to.device() : from.device();
  auto stream = current_stream(device.index());
  if (is_ours(from) && from.device() != device) {
    auto other = current_stream(from.device().index());
    let_wait(stream, other, given(other));
  }
  auto source = on_cpu(from), target = on_cpu(to);
  give(stream, {[source, target] { copy_now(target, source); }});
  bool is_late = is_ours(from) && is_ours(to);
  if (!is_ours(from)) {
    is_late = in_fallback || (non_blocking && is_pinned(from.data_ptr()));
  } else if (!is_ours(to)) {
    is_late = non_blocking && is_pinned(to.data_ptr());
  }
  if (!is_late) {
    finish(stream);
  } else if (is_ours(from) && from.device() != device) {
    auto other = current_stream(from.device().index());
    let_wait(other, stream, given(stream));
  }
  return to;
}

at::ScalarType known(std::optional<at::ScalarType> asked) {
  auto type = at::dtype_or_default(asked);
  static const bool is_narrow = std::getenv("PRETEND_WITHOUT_FLOAT64") != nullptr;
  TORCH_CHECK_TYPE(!is_narrow || (type != at::kDouble && type != at::kComplexDouble),
                   "pretend: the device has no float64. Use float32 instead.");
  return type;
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(c10::Device(kType, current_device())));
  return at::detail::empty_strided_generic(size, stride, device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), known(dtype));
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(device.value_or(c10::Device(kType, current_device())));
  return at::detail::empty_generic(size, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   known(dtype), format);
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) {
    impl->generic_set_sizes_contiguous(size);
    auto bytes = at::detail::computeStorageNbytesContiguous(size, self.dtype().itemsize(), self.storage_offset());
    if (bytes > self.storage().nbytes()) {
      at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
    }
  }
  if (format.has_value() && *format != at::MemoryFormat::Preserve) {
    impl->empty_tensor_restride(*format);
  }
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) {
    resize_(to, from.sizes(), std::nullopt);
  }
  return copy_from(from, to, false);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
                        c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
}

at::Tensor& set_empty(at::Tensor& self) {
  auto storage = c10::Storage(c10::Storage::use_byte_size_t(), 0, device_allocator(), true);
  return at::native::set_storage_cpu_(self, std::move(storage), 0, {0}, {});
}

void record_stream_of(at::Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data_ptr(), stream);
}

// A device's operators take tensors of one device, and numbers of the CPU.
void check_devices(const c10::OperatorHandle& op, const torch::jit::Stack* stack) {
  static const std::set<std::string> kMixed = {"aten::index",       "aten::index_put",  "aten::index_put_",
                                               "aten::_index_put_impl_", "aten::_pack_padded_sequence",
                                               "aten::set_data"};
  if (kMixed.count(op.schema().operator_name().name)) {
    return;
  }
  std::optional<at::Device> first;
  auto see = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || (tensor.dim() == 0 && !is_ours(tensor))) {
      return;
    }
    if (!first) {
      first = tensor.device();
    }
    TORCH_CHECK(*first == tensor.device(), "Expected all tensors to be on the same device, but found at least two ",
                "devices, ", *first, " and ", tensor.device(), "! (in ", op.schema().operator_name(), ")");
  };
  for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (value.isTensor()) {
      see(value.toTensor());
    } else if (value.isTensorList()) {
      for (const auto& each : value.toTensorVector()) {
        see(each);
      }
    }
  }
}

Index device_of(const c10::OperatorHandle& op, const torch::jit::Stack* stack) {
  for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (value.isTensor() && is_ours(value.toTensor())) {
      return value.toTensor().device().index();
    }
    if (value.isTensorList()) {
      for (const auto& each : value.toTensorVector()) {
        if (is_ours(each)) {
          return each.device().index();
        }
      }
    }
  }
  return current_device();
}

// Lets an operator that draws random numbers draw the device's.
void draw_from_device(const c10::OperatorHandle& op, torch::jit::Stack* stack, Index device) {
  const auto& arguments = op.schema().arguments();
  bool has_generator = false;
  for (size_t i = 0; i < arguments.size(); i++) {
    if (arguments[i].type()->str().find("Generator") == std::string::npos) {
      continue;
    }
    has_generator = true;
    auto& value = (*stack)[stack->size() - arguments.size() + i];
    auto generator = value.isNone() ? default_generator(device) : value.toGenerator();
    TORCH_CHECK(generator.device().type() == kType, "Expected a 'pretend' device type for generator but found '",
                generator.device(), "'");
    value = drawn_from(generator);
  }
  TORCH_CHECK(has_generator || !op.hasTag(at::Tag::nondeterministic_seeded), "pretend: ", op.schema().operator_name(),
              " draws numbers, and would draw the CPU's");
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  check_devices(op, stack);
  auto device = device_of(op, stack);
  draw_from_device(op, stack, device);
  finish(current_stream(device));
  c10::DeviceGuard guard(c10::Device(kType, device));
  InFallback inside;
  at::native::cpu_fallback(op, stack);
}

// What torch has no CPU kernel for, or one that changes its arguments without saying so.

at::Tensor late(const at::Tensor& result, at::Device device) {
  InFallback inside;
  return result.defined() ? result.to(device) : result;
}

at::Tensor early(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.cpu() : tensor;
}

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                       bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  auto offset = bias && bias->defined() ? std::optional<at::Tensor>(early(*bias)) : std::nullopt;
  return late(at::convolution_symint(early(input), early(weight), offset, stride, padding, dilation, transposed,
                                     output_padding, groups),
              input.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups, std::array<bool, 3> mask) {
  auto channels = grad.sym_size(1);
  auto [a, b, c] = at::convolution_backward_symint(early(grad), early(input), early(weight),
                                                   c10::SymIntArrayRef(&channels, 1), stride, padding, dilation,
                                                   transposed, output_padding, groups, mask);
  return {late(a, input.device()), late(b, input.device()), late(c, input.device())};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> native_batch_norm(
    const at::Tensor& input, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& mean, const std::optional<at::Tensor>& var, bool training, double momentum,
    double eps) {
  if (mean && mean->defined()) {
    auto running_mean = *mean, running_var = *var;
    return at::_native_batch_norm_legit(input, weight, bias, running_mean, running_var, training, momentum, eps);
  }
  return at::_native_batch_norm_legit(input, weight, bias, training, momentum, eps);
}

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true) || p == 0) {
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  }
  auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  auto kept = p == 1 ? at::zeros_like(input) : input * mask * (1 / (1 - p));
  return {kept, mask};
}

// Which warns, of the CPU's kernel for an output that is there, that it has another shape.
at::Tensor mse_loss(const at::Tensor& found, const at::Tensor& expected, int64_t reduction) {
  auto squares = (found - expected).square();
  return reduction == at::Reduction::Mean  ? squares.mean()
         : reduction == at::Reduction::Sum ? squares.sum()
                                           : squares;
}

at::Tensor native_dropout_backward(const at::Tensor& grad, const at::Tensor& mask, double scale) {
  return grad * mask * scale;
}

// Of operators that autograd knows.
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor& input_gates, const at::Tensor& hidden_gates,
                                                         const at::Tensor& cell,
                                                         const std::optional<at::Tensor>& input_bias,
                                                         const std::optional<at::Tensor>& hidden_bias) {
  auto all = input_gates + hidden_gates;
  if (input_bias && input_bias->defined()) {
    all = all + *input_bias + *hidden_bias;
  }
  auto gates = all.chunk(4, 1);
  auto next = gates[1].sigmoid() * cell + gates[0].sigmoid() * gates[2].tanh();
  return {gates[3].sigmoid() * next.tanh(), next, all};
}

std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& input_gates, const at::Tensor& hidden_gates,
                                            const at::Tensor& hidden, const std::optional<at::Tensor>& input_bias,
                                            const std::optional<at::Tensor>& hidden_bias) {
  bool has_bias = input_bias && input_bias->defined();
  auto from_input = (has_bias ? input_gates + *input_bias : input_gates).chunk(3, 1);
  auto from_hidden = (has_bias ? hidden_gates + *hidden_bias : hidden_gates).chunk(3, 1);
  auto reset = (from_input[0] + from_hidden[0]).sigmoid();
  auto update = (from_input[1] + from_hidden[1]).sigmoid();
  auto next = (from_input[2] + reset * from_hidden[2]).tanh();
  return {next + update * (hidden - next), input_gates};
}

// SyncBatchNorm's. Means over the batch, for each channel.
at::Tensor by_channel(const at::Tensor& input) {
  return input.transpose(0, 1).reshape({input.size(1), -1}).to(at::toOpMathType(input.scalar_type()));
}

at::Tensor spread(const at::Tensor& of_channels, const at::Tensor& like) {
  std::vector<int64_t> shape(like.dim(), 1);
  shape[1] = -1;
  return of_channels.reshape(shape);
}

std::tuple<at::Tensor, at::Tensor> batch_norm_stats(const at::Tensor& input, double eps) {
  auto values = by_channel(input);
  return {values.mean(1), (values.var(1, false) + eps).rsqrt()};
}

std::tuple<at::Tensor, at::Tensor> batch_norm_gather_stats_with_counts(
    const at::Tensor&, const at::Tensor& mean, const at::Tensor& invstd, const std::optional<at::Tensor>& running_mean,
    const std::optional<at::Tensor>& running_var, double momentum, double eps, const at::Tensor& counts) {
  auto weights = (counts.to(mean.scalar_type()) / counts.sum()).reshape({-1, 1});
  auto middle = (mean * weights).sum(0);
  auto variance = ((invstd.pow(-2) - eps + (mean - middle).square()) * weights).sum(0);
  if (running_mean && running_mean->defined()) {
    auto all = counts.sum().to(mean.scalar_type());
    running_mean->mul_(1 - momentum).add_(middle.to(running_mean->scalar_type()), momentum);
    auto unbiased = variance * all / (all - 1);
    running_var->mul_(1 - momentum).add_(unbiased.to(running_var->scalar_type()), momentum);
  }
  return {middle, (variance + eps).rsqrt()};
}

at::Tensor batch_norm_elemt(const at::Tensor& input, const std::optional<at::Tensor>& weight,
                            const std::optional<at::Tensor>& bias, const at::Tensor& mean, const at::Tensor& invstd,
                            double) {
  auto scale = weight && weight->defined() ? invstd * *weight : invstd;
  auto out = (input - spread(mean, input)) * spread(scale, input);
  return (bias && bias->defined() ? out + spread(*bias, input) : out).to(input.scalar_type());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> batch_norm_backward_reduce(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& mean, const at::Tensor& invstd,
    const std::optional<at::Tensor>& weight, bool, bool, bool) {
  auto sum = by_channel(grad).sum(1);
  auto with_input = (by_channel(grad) * (by_channel(input) - mean.unsqueeze(1))).sum(1);
  auto kind = weight && weight->defined() ? weight->scalar_type() : sum.scalar_type();
  return {sum, with_input, (with_input * invstd).to(kind), sum.to(kind)};
}

at::Tensor batch_norm_backward_elemt(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& mean,
                                     const at::Tensor& invstd, const std::optional<at::Tensor>& weight,
                                     const at::Tensor& sum, const at::Tensor& with_input, const at::Tensor& counts) {
  auto all = counts.sum().to(sum.scalar_type());
  auto scale = weight && weight->defined() ? invstd * weight->to(invstd.scalar_type()) : invstd;
  auto centered = grad - spread(sum / all, grad) -
                  (input - spread(mean, input)) * spread(invstd.square() * with_input / all, input);
  return (centered * spread(scale, input)).to(input.scalar_type());
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &at::native::set_);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_", &set_empty);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("record_stream", &record_stream_of);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("native_batch_norm", &native_batch_norm);
  m.impl("mse_loss", &mse_loss);
  m.impl("native_dropout", &native_dropout);
  m.impl("native_dropout_backward", &native_dropout_backward);
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
  m.impl("batch_norm_stats", &batch_norm_stats);
  m.impl("batch_norm_gather_stats_with_counts", &batch_norm_gather_stats_with_counts);
  m.impl("batch_norm_elemt", &batch_norm_elemt);
  m.impl("batch_norm_backward_reduce", &batch_norm_backward_reduce);
  m.impl("batch_norm_backward_elemt", &batch_norm_backward_elemt);
}

// A copy looks at these marks itself. torch's own way to take them off is a copy, which would come here again, for ever.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
}

}  // namespace pretend

namespace at::autocast {

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(FP32)
#define SET_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
  AT_FORALL_FP32_SET_OPT_DTYPE(SET_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_PROMOTE(PROMOTE)
}

}  // namespace at::autocast
