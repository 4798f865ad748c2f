// An accelerator that is none: tensors of a device of their own, in host memory, whose operators run
// on the CPU after all tensors were seen to be on the device. So what would fail on an accelerator
// because something stayed on the CPU fails here.

#include <ATen/ATen.h>
#include <ATen/CPUFunctions.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

namespace {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex COUNT = 2;
constexpr size_t MEMORY_BYTES = size_t(1) << 34;

thread_local c10::DeviceIndex current = 0;
std::atomic<int64_t> held_bytes{0}, peak_bytes{0};

struct Block {
  void* memory;
  size_t size;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  held_bytes -= block->size;
  std::free(block->memory);
  delete block;
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    auto* block = new Block{std::malloc(size ? size : 1), size};
    int64_t held = held_bytes += size, peak = peak_bytes;
    while (held > peak && !peak_bytes.compare_exchange_weak(peak, held)) {
    }
    return {block->memory, block, &release, c10::Device(TYPE, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* target, const void* source, size_t size) const override {
    std::memcpy(target, source, size);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats found;
    auto& all = found.allocated_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
    all.current = held_bytes;
    all.peak = peak_bytes;
    return found;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { peak_bytes = held_bytes.load(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    return {MEMORY_BYTES - held_bytes, MEMORY_BYTES};
  }
};

Allocator allocator;
REGISTER_ALLOCATOR(TYPE, &allocator);

// One stream a device, which is done with everything at once.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    current = device.index();
    return before;
  }
  c10::Device getDevice() const override { return {TYPE, current}; }
  void setDevice(c10::Device device) const override { current = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Stream getStream(c10::Device device) const override {
    c10::Device own(TYPE, device.has_index() ? device.index() : current);
    return c10::Stream(c10::Stream::DEFAULT, own);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return COUNT; }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag)
      const override {
    *event = const_cast<Guard*>(this);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void synchronizeEvent(void*) const override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return COUNT; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current = device; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(current, device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto data = allocator.allocate(size);
    std::memcpy(data.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(size);
  }
};

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

at::Tensor empty(
    c10::IntArrayRef sizes, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(
      sizes, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(
      sizes, strides, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

at::Tensor as_host(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(),
      at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  as_host(target).copy_(as_host(source));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

const at::Tensor& resize(
    const at::Tensor& self, c10::SymIntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(sizes), format);
}

at::Scalar item(const at::Tensor& self) { return at::native::_local_scalar_dense_cpu(self); }

at::Tensor as_strided(
    const at::Tensor& self, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides,
    std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, sizes, strides, offset);
}

at::Tensor reshape_alias(
    const at::Tensor& self, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  return at::native::_reshape_alias(
      self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef sizes) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(sizes));
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_tensor_(self, source);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  return at::native::set_(self, source);
}

at::Tensor& set_storage_at(
    at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef sizes,
    c10::IntArrayRef strides) {
  return at::cpu::set_(self, source, offset, sizes, strides);
}

using Sizes = c10::SymIntArrayRef;

at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    Sizes stride, Sizes padding, Sizes dilation, bool transposed, Sizes output_padding,
    c10::SymInt groups) {
  auto shift = bias && bias->defined() ? std::optional(as_host(*bias)) : std::nullopt;
  return at::convolution_symint(
             as_host(input), as_host(weight), shift, stride, padding, dilation, transposed,
             output_padding, groups)
      .to(input.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, Sizes stride,
    Sizes padding, Sizes dilation, bool transposed, Sizes output_padding, c10::SymInt groups,
    std::array<bool, 3> wanted) {
  auto [for_input, for_weight, for_bias] = at::convolution_backward_symint(
      as_host(gradient), as_host(input), as_host(weight),
      c10::SymIntArrayRef(weight.sym_sizes()[transposed ? 1 : 0]), stride, padding, dilation,
      transposed, output_padding, groups, wanted);
  auto back = [&](const at::Tensor& made) { return made.defined() ? made.to(input.device()) : made; };
  return {back(for_input), back(for_weight), back(for_bias)};
}

void check(const c10::OperatorHandle& op, const c10::IValue& value) {
  if (value.isTensor()) {
    const auto& tensor = value.toTensor();
    TORCH_CHECK(
        !tensor.defined() || tensor.dim() == 0 || tensor.device().type() == TYPE,
        "Expected all tensors to be on the same device, but ", op.schema().name(), " got one on ",
        tensor.device());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorList()) check(op, tensor);
  }
}

void on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto count = op.schema().arguments().size();
  for (const auto& value : torch::jit::last(*stack, count)) check(op, value);
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("resize_", resize);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("view", view);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_at);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
  KERNEL_PRIVATEUSEONE(cross_entropy_loss, fp32)
}

} // namespace
