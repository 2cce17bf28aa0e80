// A CUDA device that is none, for a torch without CUDA: its memory is memory of the host, its kernels are the CPU's.
// With -DSTAND_IN_XPU it is an XPU.
//
// What it is strict about: the host cannot read its memory (addresses are moved out of reach, whoever follows one ends
// with a segmentation fault), its tensors do not mix with those of the CPU or of another device, and autograd runs its
// nodes in threads of its own. What it does not have: time. Everything is done when the call returns.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/XPUHooksInterface.h>
#include <ATen/native/SparseTensorUtils.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>

#ifdef STAND_IN_XPU
#define KIND XPU
#define SPARSE_KIND SparseXPU
#else
#define KIND CUDA
#define SPARSE_KIND SparseCUDA
#endif

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

constexpr DeviceIndex kDevices = 2;
constexpr uintptr_t kOutOfReach = uintptr_t(1) << 62;

thread_local DeviceIndex current_device = 0;
thread_local c10::StreamId current_stream[kDevices] = {};

bool ours(const Tensor& tensor) { return tensor.device().type() == DeviceType::KIND; }

enum Count { kToHost, kQuestions, kToDevice, kSynchronisations, kCounts };
std::atomic<long> counts[kCounts];

// -- memory ---------------------------------------------------------------------------------------

void* hidden(void* address) { return address ? (void*)((uintptr_t)address + kOutOfReach) : nullptr; }
void* within_reach(const void* address) { return address ? (void*)((uintptr_t)address - kOutOfReach) : nullptr; }
void release(void* address) { std::free(within_reach(address)); }

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* address = bytes ? hidden(std::aligned_alloc(512, (bytes + 511) / 512 * 512)) : nullptr;
    return {address, address, &release, Device(DeviceType::KIND, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    memcpy(within_reach(to), within_reach(from), bytes);
  }
} device_allocator;

std::mutex pinned_lock;
std::set<const void*> pinned;

void release_pinned(void* address) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  pinned.erase(address);
  std::free(address);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* address = std::aligned_alloc(64, (bytes + 64) / 64 * 64);
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned.insert(address);
    return {address, address, &release_pinned, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
} pinned_allocator;

struct OnDevice {
  explicit OnDevice(DeviceIndex index) : before(current_device) {
    if (index >= 0) current_device = index;
  }
  ~OnDevice() { current_device = before; }
  DeviceIndex before;
};

// -- what torch asks of a device ------------------------------------------------------------------

#ifdef STAND_IN_XPU
struct XPUHooks : at::XPUHooksInterface {
  bool hasXPU() const override { return true; }
#else
struct CUDAHooks : at::CUDAHooksInterface {
  CUDAHooks(at::CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
#endif
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return ::current_device; }
  DeviceIndex deviceCount() const override { return kDevices; }
#ifdef STAND_IN_XPU
  DeviceIndex getNumGPUs() const override { return kDevices; }
#else
  int getNumGPUs() const override { return kDevices; }
#endif
  DeviceIndex getCurrentDevice() const override { return ::current_device; }
  void setCurrentDevice(DeviceIndex index) const override { ::current_device = index; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return std::exchange(::current_device, index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  Device getDeviceFromPtr(void*) const override { return Device(DeviceType::KIND, 0); }
  bool isPinnedPtr(const void* address) const override {
    std::lock_guard<std::mutex> guard(pinned_lock);
    return pinned.count(address);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void deviceSynchronize(DeviceIndex) const override { ++counts[kSynchronisations]; }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr DeviceType static_type = DeviceType::KIND;
  DeviceIndex index(Device device) const { return device.index() < 0 ? current_device : device.index(); }

  DeviceType type() const override { return DeviceType::KIND; }
  Device exchangeDevice(Device device) const override {
    return Device(DeviceType::KIND, std::exchange(current_device, device.index()));
  }
  Device getDevice() const override { return Device(DeviceType::KIND, current_device); }
  void setDevice(Device device) const override { current_device = device.index(); }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = index(device); }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }

  Stream getStream(Device device) const noexcept override {
    return Stream(Stream::UNSAFE, Device(DeviceType::KIND, index(device)), current_stream[index(device)]);
  }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device); }
  Stream getNewStream(Device device, int = 0) const override {
    static std::atomic<long> last{0};
    return Stream(Stream::UNSAFE, Device(DeviceType::KIND, index(device)), ++last);
  }
  Stream exchangeStream(Stream stream) const noexcept override {
    Stream before = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return before;
  }

  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    static int passed;
    *event = &passed;
  }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override { ++counts[kSynchronisations]; }
  void synchronizeEvent(void*) const override { ++counts[kSynchronisations]; }
  void synchronizeDevice(const DeviceIndex) const override { ++counts[kSynchronisations]; }
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};

// -- tensors of the device, seen as tensors of the host, and back ---------------------------------

void forget(void* kept) { delete static_cast<c10::Storage*>(kept); }

template <class Part>
Tensor sparse_like(const Tensor& tensor, c10::DispatchKey key, Part part) {
  auto* from = at::sparse::get_sparse_impl(tensor);
  auto result = at::detail::make_tensor<at::SparseTensorImpl>(c10::DispatchKeySet(key), tensor.dtype());
  auto* to = at::sparse::get_sparse_impl(result);
  to->resize_(from->sparse_dim(), from->dense_dim(), tensor.sizes());
  to->set_indices_and_values_unsafe(part(from->indices()), part(from->values()));
  to->set_coalesced(from->coalesced());
  return result;
}

// The same memory as a tensor of the CPU.
Tensor on_host(const Tensor& tensor) {
  if (!tensor.defined() || !ours(tensor)) return tensor;
  if (tensor.is_sparse()) return sparse_like(tensor, c10::DispatchKey::SparseCPU, &on_host);
  TORCH_CHECK(tensor.layout() == at::kStrided, "the stand-in has no tensors of layout ", tensor.layout());
  auto* kept = new c10::Storage(tensor.storage());
  void* address = within_reach(tensor.storage().data_ptr().get());
  c10::Storage storage(
      c10::Storage::use_byte_size_t(),
      tensor.storage().nbytes(),
      c10::DataPtr(address, kept, &forget, Device(DeviceType::CPU)),
      c10::GetAllocator(DeviceType::CPU),
      /*resizable=*/true);
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.is_conj()) result._set_conj(true);
  if (tensor.is_neg()) result._set_neg(true);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return result;
}

using MaybeDtype = std::optional<at::ScalarType>;
using MaybeLayout = std::optional<at::Layout>;
using MaybeDevice = std::optional<Device>;
using MaybeFormat = std::optional<at::MemoryFormat>;

Tensor empty(
    c10::IntArrayRef size, MaybeDtype dtype, MaybeLayout, MaybeDevice device, std::optional<bool>, MaybeFormat format) {
  OnDevice there(device ? device->index() : -1);
  c10::DispatchKeySet key(c10::DispatchKey::KIND);
  return at::detail::empty_generic(size, &device_allocator, key, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, MaybeDtype dtype, MaybeLayout, MaybeDevice device, std::optional<bool>) {
  OnDevice there(device ? device->index() : -1);
  c10::DispatchKeySet key(c10::DispatchKey::KIND);
  return at::detail::empty_strided_generic(size, stride, &device_allocator, key, c10::dtype_or_default(dtype));
}

// A copy of a tensor of the CPU.
Tensor copied(const Tensor& tensor, Device device) {
  if (!tensor.defined()) return tensor;
  if (tensor.is_sparse()) {
    OnDevice there(device.index());
    return sparse_like(tensor, c10::DispatchKey::SPARSE_KIND, [&](const Tensor& part) { return copied(part, device); });
  }
  auto dtype = tensor.scalar_type();
  Tensor result = tensor.is_non_overlapping_and_dense()
      ? empty_strided(tensor.sizes(), tensor.strides(), dtype, {}, device, {})
      : empty(tensor.sizes(), dtype, {}, device, {}, {});
  if (tensor.numel()) on_host(result).copy_(tensor);
  return result;
}

// -- every operation that is not here below: the CPU's, on the same memory ------------------------

// They make the host wait for the device to know what comes out.
const std::set<std::string> kAsking{
    "aten::equal", "aten::masked_select", "aten::nonzero", "aten::unique_consecutive", "aten::_unique2"};
// Indices may be on the CPU.
const std::set<std::string> kMixing{"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"};

struct Call {
  std::optional<Device> device;
  std::string stranger;
  std::vector<std::pair<Tensor, Tensor>> pairs;

  Tensor in(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!ours(tensor)) {
      if (tensor.dim()) stranger = tensor.device().str();
      return tensor;
    }
    if (!device) device = tensor.device();
    if (*device != tensor.device() && tensor.dim()) stranger = tensor.device().str();
    pairs.emplace_back(tensor, on_host(tensor));
    return pairs.back().second;
  }

  Tensor out(const Tensor& host) const {
    if (!host.defined()) return host;
    for (auto& [tensor, view] : pairs)
      if (host.unsafeGetTensorImpl() == view.unsafeGetTensorImpl()) return tensor;
    if (host.layout() == at::kStrided && host.storage().nbytes())
      for (auto& [tensor, view] : pairs)
        if (!tensor.is_sparse() && host.storage().data_ptr().get() == view.storage().data_ptr().get())
          return at::native::as_strided_tensorimpl(tensor, host.sizes(), host.strides(), host.storage_offset());
    return copied(host, *device);
  }

  // Those that were given as out= and had another shape.
  void take_resized() const {
    for (auto& [tensor, view] : pairs) {
      if (tensor.is_sparse() || (tensor.sizes().equals(view.sizes()) && tensor.strides() == view.strides())) continue;
      Tensor fresh = copied(view, tensor.device());
      auto* impl = tensor.unsafeGetTensorImpl();
      impl->set_storage_keep_dtype(fresh.storage());
      impl->set_storage_offset(fresh.storage_offset());
      impl->set_sizes_and_strides(fresh.sizes(), fresh.strides());
    }
  }
};

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto& schema = op.schema();
  if (kAsking.count(schema.name())) ++counts[kQuestions];
  Call call;
  for (size_t place = stack->size() - schema.arguments().size(); place < stack->size(); ++place) {
    auto& value = (*stack)[place];
    if (value.isTensor()) {
      value = call.in(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& each : value.toTensorVector()) list.push_back(call.in(each));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (std::optional<Tensor> each : value.toOptionalTensorList())
        list.push_back(each ? std::optional<Tensor>(call.in(*each)) : each);
      value = list;
    } else if (value.isDevice()) {
      if (!call.device) call.device = value.toDevice();
      value = Device(DeviceType::CPU);
    }
  }
  if (!call.device) call.device = Device(DeviceType::KIND, current_device);
  TORCH_CHECK(
      call.stranger.empty() || kMixing.count(schema.name()),
      "Expected all tensors to be on the same device, but found at least two devices, ", *call.device, " and ",
      call.stranger, "! (", schema.name(), ")");
  bool sparse = schema.name().find("sparse") != std::string::npos || schema.name().find("coalesce") != std::string::npos;
  for (auto& [tensor, view] : call.pairs) sparse = sparse || tensor.is_sparse();
  if (sparse) {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(stack);
  } else {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  call.take_resized();
  for (size_t place = stack->size() - schema.returns().size(); place < stack->size(); ++place) {
    auto& value = (*stack)[place];
    if (value.isTensor()) {
      value = call.out(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& each : value.toTensorVector()) list.push_back(call.out(each));
      value = list;
    }
  }
}

// -- operations that touch the device's own storages ----------------------------------------------

Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  if (ours(to) != ours(from) && from.numel()) {
    ++counts[ours(to) ? kToDevice : kToHost];
    if (!non_blocking) ++counts[kSynchronisations];
  }
  Tensor target = on_host(to);
  target.copy_(on_host(from));
  return to;
}

at::Scalar item(const Tensor& tensor) {
  ++counts[kQuestions];
  return on_host(tensor).item();
}

const Tensor& resize_(const Tensor& tensor, c10::IntArrayRef size, MaybeFormat) {
  size_t bytes = (c10::multiply_integers(size) + tensor.storage_offset()) * tensor.dtype().itemsize();
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  if (bytes > storage->nbytes()) {
    OnDevice there(tensor.device().index());
    auto memory = device_allocator.allocate(bytes);
    if (storage->nbytes()) memcpy(within_reach(memory.get()), within_reach(storage->data()), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(memory));
    storage->set_nbytes(bytes);
  }
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return tensor;
}

Tensor& set_storage(
    Tensor& tensor, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  impl->set_storage_offset(offset);
  if (stride.size() == size.size())
    impl->set_sizes_and_strides(size, stride);
  else
    impl->set_sizes_contiguous(size);
  return tensor;
}
Tensor& set_whole(Tensor& tensor, at::Storage storage) {
  return set_storage(tensor, storage, 0, {int64_t(storage.nbytes() / tensor.dtype().itemsize())}, {});
}
Tensor& set_tensor(Tensor& tensor, const Tensor& from) {
  return set_storage(tensor, from.storage(), from.storage_offset(), from.sizes(), from.strides());
}
void record_stream(Tensor&, Stream) {}

}  // namespace

namespace at {
// torch looks for these names.
#ifdef STAND_IN_XPU
using ::XPUHooks;
REGISTER_XPU_HOOKS(XPUHooks)
#else
using ::CUDAHooks;
REGISTER_CUDA_HOOKS(CUDAHooks)
#endif
}  // namespace at

namespace {
C10_REGISTER_GUARD_IMPL(KIND, Guard);
c10::AllocatorRegisterer<DeviceType::KIND> registered(&device_allocator);
}  // namespace

TORCH_LIBRARY_IMPL(_, KIND, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }
TORCH_LIBRARY_IMPL(_, SPARSE_KIND, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, KIND, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("copy_", &copy_);
  library.impl("_local_scalar_dense", &item);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", &set_whole);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("record_stream", &record_stream);
}

TORCH_LIBRARY_IMPL(aten, SPARSE_KIND, library) {
  library.impl("_indices", &at::native::_indices_sparse);
  library.impl("_values", &at::native::_values_sparse);
  // torch has kernels for all devices for these, which do not know ours.
  for (auto name :
       {"is_coalesced", "_nnz", "sparse_dim", "dense_dim", "indices", "values", "_coalesced_", "_to_dense", "add.Tensor",
        "add_.Tensor", "mul.Tensor", "mul_.Tensor", "div.Tensor", "zero_", "clone", "copy_"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

extern "C" long stand_in_count(int which) { return counts[which]; }
extern "C" void stand_in_set_device(int index) { current_device = index; }
extern "C" int stand_in_device() { return current_device; }
