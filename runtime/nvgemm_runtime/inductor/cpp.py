"""The C++ that calls bundled kernels, in cpp_wrapper's modules and in AOTInductor's packages.

A call goes through torch's dispatcher to ``nvgemm_aot::try_gemm``, which returns whether the kernel
could serve it; where it could not, or where the native launcher is not in the process, the stock
ATen call runs instead. So a package loads and computes correctly without nvgemm-aot.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..gemm.roles import Role
from ..launch.native import ABI

_EXTRAS = tuple(role.value for role in Role if role not in (Role.A, Role.B, Role.OUT))
"""What kernels take besides A and B, in the order of ``try_gemm``'s arguments."""

LIBRARY_SONAME = "libnvgemm_aot.so"
"""Soname of the native launcher (runtime/csrc/CMakeLists.txt sets it)."""

HEADER = f"""
#ifndef NVGEMM_AOT_IN_THIS_FILE
#define NVGEMM_AOT_IN_THIS_FILE
#include <dlfcn.h>
#include <atomic>
#include <cstring>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

namespace nvgemm_aot {{
// A kernel as this process knows it: not asked for yet, missing, or a number that try_gemm takes.
constexpr int64_t kNotAsked = -2;
constexpr int64_t kMissing = -1;
struct Kernel {{
    std::atomic<int64_t> handle{{kNotAsked}};
    std::atomic<bool> has_run{{false}};
}};

// Whether torch has the operators that this code was written for. Asking torch would log an error.
inline bool operators_are_there() {{
    static const bool there = [] {{
        void* library = dlopen("{LIBRARY_SONAME}", RTLD_NOLOAD | RTLD_LAZY);
        if (library == nullptr) return false;
        void* abi = dlsym(library, "nvgemm_aot_operators_abi");
        return abi != nullptr && reinterpret_cast<int64_t (*)()>(abi)() == {ABI};
    }}();
    return there;
}}

inline StableIValue string_value(const char* text) {{
    StringHandle handle = nullptr;
    AOTI_TORCH_ERROR_CODE_CHECK(torch_new_string_handle(text, std::strlen(text), &handle));
    return reinterpret_cast<StableIValue>(handle);
}}

inline StableIValue tensor_value(AtenTensorHandle tensor) {{
    AtenTensorHandle copy = nullptr;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(tensor, &copy));
    return reinterpret_cast<StableIValue>(copy);
}}

// What an optional argument of an operator is: nothing, or a value that the callee frees.
inline StableIValue optional_value(AtenTensorHandle tensor) {{
    if (tensor == nullptr) return 0;
    return reinterpret_cast<StableIValue>(new StableIValue(tensor_value(tensor)));
}}

// What a kernel takes besides A and B; nullptr for what it does not.
struct Extras {{
    AtenTensorHandle {", ".join(_EXTRAS)};
}};

// No lock is held: preparing calls Python, and waits for its lock.
inline int64_t prepare(const char* id, const char* origin, Kernel& kernel) {{
    int64_t handle = kernel.handle.load(std::memory_order_acquire);
    if (handle == kNotAsked) {{
        StableIValue stack[2] = {{string_value(id), string_value(origin)}};
        AOTI_TORCH_ERROR_CODE_CHECK(
            torch_call_dispatcher("nvgemm_aot::prepare", "", stack, TORCH_ABI_VERSION));
        handle = static_cast<int64_t>(stack[0]);
        kernel.handle.store(handle, std::memory_order_release);
    }}
    return handle;
}}

// out = a @ b, with the extras, by a kernel; false, and nothing done, where that cannot be.
inline bool gemm(AtenTensorHandle a, AtenTensorHandle b, AtenTensorHandle out, const Extras& extras,
                 const char* id, const char* origin, Kernel& kernel) {{
    if (!operators_are_there()) return false;
    const int64_t handle = prepare(id, origin, kernel);
    if (handle == kMissing) return false;
    StableIValue stack[8] = {{tensor_value(a),
                             tensor_value(b),
                             static_cast<StableIValue>(handle),
                             tensor_value(out),
                             optional_value(extras.scale_a),
                             optional_value(extras.scale_b),
                             optional_value(extras.offsets),
                             optional_value(extras.addend)}};
    const AOTITorchError error =
        torch_call_dispatcher("nvgemm_aot::try_gemm", "", stack, TORCH_ABI_VERSION);
    if (error != AOTI_TORCH_SUCCESS && !kernel.has_run.load(std::memory_order_relaxed)) {{
        // It never ran here, say because the driver cannot load it; torch has logged the reason.
        kernel.handle.store(kMissing, std::memory_order_release);
        return false;
    }}
    AOTI_TORCH_ERROR_CODE_CHECK(error);
    const bool done = static_cast<bool>(stack[0]);
    if (done) kernel.has_run.store(true, std::memory_order_relaxed);
    return done;
}}
}}  // namespace nvgemm_aot
#endif
"""
"""Precedes every kernel call in a generated file, and may appear in it twice, as torch assembles
files from parts."""


def declaration(name: str) -> str:
    """The definition of a kernel's variable; like the header it may appear twice."""
    guard = f"NVGEMM_AOT_HAS_{name}"
    return f"#ifndef {guard}\n#define {guard}\nstatic nvgemm_aot::Kernel {name};\n#endif\n"


def condition(
    name: str,
    kernel_id: str,
    origin: str,
    a: str,
    b: str,
    out: str,
    extras: Mapping[str, str] | None = None,
) -> str:
    """A condition that computes ``out = a @ b``, and is false where the kernel cannot."""
    quoted = origin.replace("\\", "\\\\").replace('"', '\\"')
    given = extras or {}
    others = ", ".join(given.get(role, "nullptr") for role in _EXTRAS)
    return f'nvgemm_aot::gemm({a}, {b}, {out}, {{{others}}}, "{kernel_id}", "{quoted}", {name})'
