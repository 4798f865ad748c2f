// An accelerator that is none: tensors of a device of their own, in host memory, whose operators run
// on the CPU after all tensors were seen to be on the device. So what would fail on an accelerator
// because something stayed on the CPU fails here, and so does what would use memory too soon (see
// streams.h).

// The headers of single operators: those of all together take the compiler twice as long.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "streams.h"

namespace at::autocast { // as ATen/autocast_mode.h declares them, which includes all operators
TORCH_API ScalarType get_autocast_dtype(DeviceType device_type);
TORCH_API Tensor cached_cast(ScalarType to_type, const Tensor& arg, DeviceType device_type);
} // namespace at::autocast

namespace {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex COUNT = 2;
constexpr size_t MEMORY_BYTES = size_t(1) << 34;

thread_local c10::DeviceIndex current = 0;
std::atomic<int64_t> held_bytes{0}, peak_bytes{0};

void release(void* context) {
  auto* block = static_cast<late::Block*>(context);
  held_bytes -= block->size;
  late::release(block);
}

void release_pinned(void* context) { late::release(static_cast<late::Block*>(context)); }

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    auto* block = late::allocate(size, current, false);
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
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override {
    std::lock_guard guard(late::lock);
    if (auto* block = late::block_of(memory.get())) block->recorded.insert(late::index_of(stream));
  }
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

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    auto* block = late::allocate(size, current, true);
    return {block->memory, block, &release_pinned, c10::kCPU};
  }
  void copy_data(void* target, const void* source, size_t size) const override {
    std::memcpy(target, source, size);
  }
};

PinnedAllocator pinned_allocator;

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
    auto index = device.has_index() ? device.index() : current;
    return stream_of(index, late::current[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(device.has_index() ? device.index() : current, 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<int> made{0};
    auto index = device.has_index() ? device.index() : current;
    return stream_of(index, 1 + made++ % (late::STREAMS_OF_DEVICE - 1));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto& id = late::current[stream.device_index()];
    return stream_of(stream.device_index(), std::exchange(id, static_cast<int>(stream.id())));
  }
  c10::DeviceIndex deviceCount() const noexcept override { return COUNT; }
  void record(
      void** event, const c10::Stream& stream, const c10::DeviceIndex,
      const c10::EventFlag) const override {
    std::lock_guard guard(late::lock);
    if (!*event) *event = new late::Event;
    auto index = late::index_of(stream);
    auto end_ns = std::max(late::now_ns(), late::end_ns[index]);
    late::join(late::known[index], late::host);
    *static_cast<late::Event*>(*event) = {late::known[index], end_ns};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    std::lock_guard guard(late::lock);
    auto& [clock, end_ns] = *static_cast<late::Event*>(event);
    auto index = late::index_of(stream);
    late::join(late::known[index], clock);
    late::end_ns[index] = std::max(late::end_ns[index], end_ns);
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    std::lock_guard guard(late::lock);
    auto& [clock, end_ns] = *static_cast<late::Event*>(event);
    bool over = late::now_ns() >= end_ns;
    if (over) late::host_waited_for(clock);
    return over;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<late::Event*>(event);
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    late::Event now;
    {
      std::lock_guard guard(late::lock);
      now = *static_cast<late::Event*>(event);
    }
    late::wait(now.clock, now.end_ns);
  }
  bool queryStream(const c10::Stream& stream) const override {
    std::lock_guard guard(late::lock);
    auto index = late::index_of(stream);
    bool over = late::now_ns() >= late::end_ns[index];
    if (over) late::host_waited_for(late::known[index]);
    return over;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    late::wait_for_stream(late::index_of(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    for (int id = 0; id < late::STREAMS_OF_DEVICE; ++id)
      late::wait_for_stream((device < 0 ? current : device) * late::STREAMS_OF_DEVICE + id);
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    allocator.recordStream(memory, stream);
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    std::lock_guard guard(late::lock);
    return (static_cast<late::Event*>(to)->end_ns - static_cast<late::Event*>(from)->end_ns) / 1e6;
  }
  static c10::Stream stream_of(c10::DeviceIndex device, int id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(TYPE, device), id);
  }
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
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* memory) const override {
    std::lock_guard guard(late::lock);
    auto* block = late::block_of(memory);
    return block && block->on_host;
  }
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

// One operation of the current stream.
class Kernel {
 public:
  Kernel(
      const std::string& name, const std::vector<at::Tensor>& reads,
      const std::vector<at::Tensor>& writes, size_t copied_bytes = 0)
      : outermost_(late::within++ == 0) {
    if (!outermost_) return;
    stream_ = current * late::STREAMS_OF_DEVICE + late::current[current];
    std::lock_guard guard(late::lock);
    try {
      use_ = {stream_, late::launch(name, stream_, known(reads), known(writes), copied_bytes), name};
    } catch (...) {
      --late::within;
      throw;
    }
  }
  ~Kernel() { --late::within; }
  Kernel(const Kernel&) = delete;

  void made(const at::Tensor& tensor) {
    if (!outermost_ || !tensor.defined() || tensor.device().type() != TYPE) return;
    std::lock_guard guard(late::lock);
    for (auto* block : known({tensor})) block->written = use_;
  }
  bool outermost() const { return outermost_; }
  int stream() const { return stream_; }
  int64_t number() const { return use_.number; }

 private:
  static std::vector<late::Block*> known(const std::vector<at::Tensor>& tensors) {
    std::vector<late::Block*> found;
    for (const auto& tensor : tensors)
      if (tensor.defined() && tensor.numel())
        if (auto* block = late::block_of(tensor.storage().data())) found.push_back(block);
    return found;
  }

  bool outermost_;
  int stream_ = -1;
  late::Use use_;
};

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  c10::DeviceGuard guard(target.is_cpu() ? source.device() : target.device());
  auto bytes = source.is_cpu() || target.is_cpu() ? target.nbytes() : 0;
  Kernel kernel("a copy", {source}, {target}, bytes);
  const auto& host = source.is_cpu() ? source : target;
  auto plain = host.is_cpu() && kernel.outermost() && host.numel();
  auto pinned = plain && late::block_of(host.data_ptr()) != nullptr;
  auto later = pinned && non_blocking && host.is_contiguous();
  if (plain && source.is_cpu()) {
    std::lock_guard lock(late::lock);
    late::land_before(late::known[kernel.stream()], host.data_ptr(), host.nbytes());
  }
  as_host(target).copy_(as_host(source));
  if (plain) {
    std::lock_guard lock(late::lock);
    late::counts.unpinned += !pinned && host.dim() > 0;
    if (later)
      late::land(kernel.stream(), kernel.number(), host.data_ptr(), host.nbytes(), target.is_cpu(), "a copy");
  }
  if (plain && !later) late::wait_for_stream(kernel.stream());
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

at::Scalar item(const at::Tensor& self) {
  c10::DeviceGuard guard(self.device());
  Kernel kernel("item", {self}, {});
  if (kernel.outermost()) late::wait_for_stream(kernel.stream());
  return at::native::_local_scalar_dense_cpu(self);
}

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

void record_stream(at::Tensor& self, c10::Stream stream) {
  allocator.recordStream(self.storage().data_ptr(), stream);
}

using Sizes = c10::SymIntArrayRef;

at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    Sizes stride, Sizes padding, Sizes dilation, bool transposed, Sizes output_padding,
    c10::SymInt groups) {
  Kernel kernel("convolution", {input, weight, bias.value_or(at::Tensor())}, {});
  auto shift = bias && bias->defined() ? std::optional(as_host(*bias)) : std::nullopt;
  auto made = at::convolution_symint(
                  as_host(input), as_host(weight), shift, stride, padding, dilation, transposed,
                  output_padding, groups)
                  .to(input.device());
  kernel.made(made);
  return made;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, Sizes stride,
    Sizes padding, Sizes dilation, bool transposed, Sizes output_padding, c10::SymInt groups,
    std::array<bool, 3> wanted) {
  Kernel kernel("convolution_backward", {gradient, input, weight}, {});
  auto [for_input, for_weight, for_bias] = at::convolution_backward_symint(
      as_host(gradient), as_host(input), as_host(weight),
      c10::SymIntArrayRef(weight.sym_sizes()[transposed ? 1 : 0]), stride, padding, dilation,
      transposed, output_padding, groups, wanted);
  auto back = [&](const at::Tensor& found) {
    auto made = found.defined() ? found.to(input.device()) : found;
    kernel.made(made);
    return made;
  };
  return {back(for_input), back(for_weight), back(for_bias)};
}

void on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  std::vector<at::Tensor> reads, writes;
  c10::DeviceIndex device = current;
  auto add = [&](const at::Tensor& tensor, bool written) {
    if (!tensor.defined()) return;
    TORCH_CHECK(
        tensor.dim() == 0 || tensor.device().type() == TYPE,
        "Expected all tensors to be on the same device, but ", schema.name(), " got one on ",
        tensor.device());
    if (tensor.device().type() != TYPE) return;
    device = tensor.device().index();
    (written ? writes : reads).push_back(tensor);
  };
  const auto arguments = torch::jit::last(*stack, schema.arguments().size());
  for (size_t at = 0; at < arguments.size(); ++at) {
    const auto* alias = schema.arguments()[at].alias_info();
    const bool written = alias && alias->isWrite();
    if (arguments[at].isTensor()) {
      add(arguments[at].toTensor(), written);
    } else if (arguments[at].isTensorList()) {
      for (const at::Tensor& tensor : arguments[at].toTensorList()) add(tensor, written);
    } else if (arguments[at].isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& tensor : arguments[at].toOptionalTensorList())
        if (tensor) add(*tensor, written);
    }
  }
  c10::DeviceGuard guard({TYPE, device});
  Kernel kernel(schema.name(), reads, writes);
  at::native::cpu_fallback(op, stack);
  for (const auto& value : torch::jit::last(*stack, schema.returns().size())) {
    if (value.isTensor()) kernel.made(value.toTensor());
    if (value.isTensorList())
      for (const at::Tensor& tensor : value.toTensorList()) kernel.made(tensor);
  }
}

std::vector<int64_t> counts() {
  std::lock_guard guard(late::lock);
  return {late::counts.waits, late::counts.unpinned};
}

void sleep(int64_t duration_ns) {
  std::lock_guard guard(late::lock);
  auto stream = current * late::STREAMS_OF_DEVICE + late::current[current];
  late::launch("sleep", stream, {}, {});
  late::end_ns[stream] += duration_ns;
}

TORCH_LIBRARY(pretended, m) {
  m.def("sleep(int duration_ns) -> ()", sleep);  // of the current stream
  m.def("counts() -> int[]", counts);  // waits of the host, copies from and to unpinned memory
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
  m.impl("record_stream", record_stream);
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

// An operator under autocast: with its tensors in the lower precision, or in float32.
template <bool lower>
void cast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::AutocastPrivateUse1);
  const auto dtype = lower ? at::autocast::get_autocast_dtype(TYPE) : at::kFloat;
  for (auto value = stack->end() - op.schema().arguments().size(); value != stack->end(); ++value)
    if (value->isTensor() && value->toTensor().defined())
      *value = at::autocast::cached_cast(dtype, value->toTensor(), TYPE);
  op.callBoxed(stack);
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (const auto* name : {"linear", "matmul", "scaled_dot_product_attention"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&cast<true>>());
  for (const auto* name : {"layer_norm", "cross_entropy_loss"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&cast<false>>());
}

} // namespace
