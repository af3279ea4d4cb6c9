// Operators of the device: making tensors, copying them, and all else computed on the CPU.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "device.h"
#include "hbm.h"

namespace neuronsim {
namespace {

// --- making ----------------------------------------------------------------------------------

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

// What the compiler refuses or the core does not compute.
bool supported(c10::ScalarType type) {
  switch (type) {
    case c10::ScalarType::Double:
    case c10::ScalarType::UInt16:
    case c10::ScalarType::UInt32:
    case c10::ScalarType::UInt64:
    case c10::ScalarType::Float8_e4m3fnuz:
    case c10::ScalarType::Float8_e5m2fnuz:
      return false;
    default:
      return !c10::isComplexType(type);
  }
}

c10::Device checked(std::optional<c10::Device> device, c10::ScalarType type) {
  const auto where = c10::device_or_default(device);
  if (where.has_index()) cores().check(where.index());
  TORCH_CHECK_TYPE(supported(type), "dtype ", type, " is not supported on the neuron device");
  return where;
}

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype,
                 std::optional<c10::Layout>, std::optional<c10::Device> device,
                 std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const auto type = c10::dtype_or_default(dtype);
  const c10::DeviceGuard guard(checked(device, type));
  return at::detail::empty_generic(size, allocator(), kKeys, type, format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                         std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                         std::optional<c10::Device> device, std::optional<bool>) {
  const auto type = c10::dtype_or_default(dtype);
  const c10::DeviceGuard guard(checked(device, type));
  return at::detail::empty_strided_generic(size, stride, allocator(), kKeys, type);
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size,
                         std::optional<c10::MemoryFormat>) {
  const auto wanted = C10_AS_INTARRAYREF_SLOW(size);
  const size_t need = at::detail::computeStorageNbytesContiguous(wanted, self.element_size(),
                                                                 self.storage_offset());
  if (need > self.storage().nbytes())
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), need);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(wanted);
  return self;
}

// --- copying ---------------------------------------------------------------------------------

// A tensor's first byte, without data_ptr()'s assumption that the host may look.
void* address(const at::Tensor& tensor) {
  auto* start = static_cast<char*>(tensor.storage().unsafeGetStorageImpl()->data_ptr().get());
  return start + tensor.storage_offset() * tensor.element_size();
}

at::Tensor host_like(const at::Tensor& tensor, c10::IntArrayRef size) {
  return at::empty(size, tensor.options().device(at::kCPU));
}

// Elements from a strided tensor's first to its last.
int64_t extent(const at::Tensor& tensor) {
  int64_t last = 0;
  for (const auto dim : c10::irange(tensor.dim())) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  return last + 1;
}

// All that lies between a strided tensor's ends, restrided on the host.
at::Tensor read_extent(const at::Tensor& tensor) {
  auto all = host_like(tensor, {extent(tensor)});
  hbm().read(all.data_ptr(), address(tensor), all.nbytes());
  return all;
}

at::Tensor to_host(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return host_like(tensor, tensor.sizes());
  if (!tensor.is_contiguous())
    return read_extent(tensor).as_strided(tensor.sizes(), tensor.strides()).contiguous();
  auto host = host_like(tensor, tensor.sizes());
  hbm().read(host.data_ptr(), address(tensor), host.nbytes());
  return host;
}

// `source` has the target's dtype and sizes. Returns the bytes of host copies that it took.
int64_t write(const at::Tensor& target, const at::Tensor& source) {
  if (target.is_contiguous()) {
    const auto whole = source.contiguous();
    hbm().write(address(target), whole.data_ptr(), whole.nbytes());
    return source.is_contiguous() ? 0 : whole.nbytes();
  }
  auto all = read_extent(target);
  all.as_strided(target.sizes(), target.strides()).copy_(source);
  hbm().write(address(target), all.data_ptr(), all.nbytes());
  return all.nbytes();
}

void host_to_device(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  cores().initialized = true;
  const bool casts = source.scalar_type() != target.scalar_type();
  const auto typed = casts ? source.to(target.scalar_type()) : source;
  const int64_t staged = write(target, typed.expand(target.sizes()));
  if (Uncounted::active()) return;
  auto& count = counters();
  count.h2d += target.nbytes();
  count.staged += staged;
  if (casts) count.cast += typed.nbytes();
  if (non_blocking || target.numel() == 1) count.bounce += target.nbytes();
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  if (target.numel() == 0) return target;
  if (source.is_cpu()) {
    host_to_device(source, target, non_blocking);
  } else if (target.is_cpu()) {
    if (!Uncounted::active()) counters().d2h += source.nbytes();
    target.copy_(to_host(source));
  } else {
    TORCH_CHECK(source.device() == target.device(), "cannot copy from ", source.device(), " to ",
                target.device());
    write(target, to_host(source).to(target.scalar_type()).expand(target.sizes()));
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (target.sizes() != source.sizes())
    at::native::resize_(target, source.sizes(), std::nullopt);
  return copy_from(source, target, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  return at::_local_scalar_dense(to_host(self));
}

// --- computing -------------------------------------------------------------------------------

bool belongs(const at::Tensor& tensor) {
  return !tensor.defined() || tensor.device().type() == kNeuron || tensor.dim() == 0 ||
         tensor.is_meta() || tensor.numel() == 0;
}

void check_device(const at::Tensor& tensor, const std::string& name) {
  TORCH_CHECK(belongs(tensor), "Expected all tensors to be on the same device, but found neuron and ",
              tensor.device(), " (", name, ")");
}

// cpu_fallback would take host tensors among the arguments; a device does not.
void check_devices(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& name = op.operator_name().name;
  if (name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index_put", 0) == 0) return;
  for (const auto& value : torch::jit::last(stack, op.schema().arguments().size())) {
    if (value.isTensor()) check_device(value.toTensor(), name);
    if (value.isTensorList())
      for (const auto& tensor : value.toTensorVector()) check_device(tensor, name);
  }
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  check_devices(op, *stack);
  const Uncounted own;
  at::native::cpu_fallback(op, stack);
}

// The CPU has no kernel of this name to fall back to: PyTorch asks it of other backends only.
at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias, c10::SymIntArrayRef stride,
                       c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
                       c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  const auto added = bias.value_or(at::Tensor());
  for (const auto& tensor : {input, weight, added}) check_device(tensor, "aten::convolution");
  const Uncounted own;
  const auto result = at::convolution_symint(
      to_host(input), to_host(weight), added.defined() ? to_host(added) : added, stride, padding,
      dilation, transposed, output_padding, groups);
  return result.to(input.device());
}

int64_t sdp_choice(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                   const std::optional<at::Tensor>&, double, bool, std::optional<double>, bool) {
  return 0;  // the composite of plain operators
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("resize_", TORCH_FN(resize));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
  m.impl("_fused_sdp_choice", TORCH_FN(sdp_choice));
  m.impl("convolution_overrideable", TORCH_FN(convolution));
  // views: no byte is touched, so the generic ones do
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
  m.impl("set_.source_Storage", TORCH_FN(at::native::set_));
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
}

}  // namespace
}  // namespace neuronsim
