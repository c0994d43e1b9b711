// A device of torch's that is neither a CPU nor CUDA's: "foreign". Its memory is behind addresses that fault when the CPU
// touches them, so that only torch's own calls reach it. Built by foreign_device.py.

#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>

namespace {

constexpr auto FOREIGN = c10::DeviceType::PrivateUse1;
// No CPU has such an address.
constexpr uintptr_t AWAY = uintptr_t{1} << 60;

void* far_of(void* near) { return near ? reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(near) + AWAY) : nullptr; }
void* near_of(const void* far) { return far ? reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(far) - AWAY) : nullptr; }
void release(void* far) { std::free(near_of(far)); }

struct Memory final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override {
        void* far = far_of(bytes ? std::malloc(bytes) : nullptr);
        return {far, far, &release, c10::Device(FOREIGN, 0)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void* to, const void* from, size_t bytes) const override {
        std::memcpy(near_of(to), near_of(from), bytes);
    }
};

Memory memory;
REGISTER_ALLOCATOR(FOREIGN, &memory);

// All work is done when a call returns, so events have nothing to wait for.
struct Guard final : c10::impl::NoOpDeviceGuardImpl<FOREIGN> {
    c10::Device exchangeDevice(c10::Device) const override { return {FOREIGN, 0}; }
    c10::Device getDevice() const override { return {FOREIGN, 0}; }
    c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, {FOREIGN, 0}); }
    c10::Stream exchangeStream(c10::Stream) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, {FOREIGN, 0}); }
    void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {
        *event = const_cast<Guard*>(this);
    }
    bool queryEvent(void*) const override { return true; }
    void synchronizeEvent(void*) const override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
    c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
    return at::detail::empty_generic(size, &memory, keys, c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef strides, std::optional<at::ScalarType> type,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
    c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
    return at::detail::empty_strided_generic(size, strides, &memory, keys, c10::dtype_or_default(type));
}

// The same memory, as the CPU reaches it.
at::Tensor near(const at::Tensor& tensor) {
    if (!tensor.is_privateuseone()) {
        return tensor;
    }
    auto options = tensor.options().device(at::kCPU);
    return at::from_blob(near_of(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), options);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
    near(to).copy_(near(from));
    return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) { return copy_from(from, to, false); }

void by_the_cpu(const c10::OperatorHandle& call, torch::jit::Stack* stack) { at::native::cpu_fallback(call, stack); }

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", empty);
    m.impl("empty_strided", empty_strided);
    m.impl("as_strided", at::native::as_strided_tensorimpl);
    m.impl("view", at::native::view);
    m.impl("_copy_from", copy_from);
    m.impl("_copy_from_and_resize", copy_from_and_resize);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_the_cpu>()); }
