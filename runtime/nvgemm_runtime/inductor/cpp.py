"""What generated C++ contains of us, in cpp_wrapper's modules and in AOTInductor's packages.

A call goes through torch's dispatcher to ``nvgemm_aot::try_gemm``, which says whether the kernel
could serve it; where it could not, or where our library is not in the process, the stock ATen call
behind it runs. So a package needs nothing of ours to be loaded, and to be right.
"""

from __future__ import annotations

LIBRARY_SONAME = "libnvgemm_aot.so"
"""By what the loader knows the native launcher (runtime/csrc/CMakeLists.txt sets it)."""

HEADER = f"""
#include <dlfcn.h>
#include <atomic>
#include <cstring>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

namespace nvgemm_aot {{
// A kernel as this process knows it: not asked for yet, missing, or a number that try_gemm takes.
constexpr int64_t kNotAsked = -2;
constexpr int64_t kMissing = -1;
using Handle = std::atomic<int64_t>;

// Whether nvgemm-aot's library is loaded. Asking torch for its operators would log an error.
inline bool library_is_loaded() {{
    static const bool loaded = dlopen("{LIBRARY_SONAME}", RTLD_NOLOAD | RTLD_LAZY) != nullptr;
    return loaded;
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

// No lock is held: preparing calls Python, and waits for its lock.
inline int64_t prepare(const char* kernel, const char* origin, Handle& handle) {{
    int64_t known = handle.load(std::memory_order_acquire);
    if (known == kNotAsked) {{
        StableIValue stack[2] = {{string_value(kernel), string_value(origin)}};
        AOTI_TORCH_ERROR_CODE_CHECK(
            torch_call_dispatcher("nvgemm_aot::prepare", "", stack, TORCH_ABI_VERSION));
        known = static_cast<int64_t>(stack[0]);
        handle.store(known, std::memory_order_release);
    }}
    return known;
}}

// out = a @ b by a kernel; false, and nothing done, where that cannot be.
inline bool gemm(AtenTensorHandle a, AtenTensorHandle b, AtenTensorHandle out,
                 const char* kernel, const char* origin, Handle& handle) {{
    if (!library_is_loaded()) return false;
    const int64_t known = prepare(kernel, origin, handle);
    if (known == kMissing) return false;
    StableIValue stack[4] = {{tensor_value(a), tensor_value(b), static_cast<StableIValue>(known),
                             tensor_value(out)}};
    AOTI_TORCH_ERROR_CODE_CHECK(
        torch_call_dispatcher("nvgemm_aot::try_gemm", "", stack, TORCH_ABI_VERSION));
    return static_cast<bool>(stack[0]);
}}
}}  // namespace nvgemm_aot
"""
"""Goes into a generated file once, before anything that calls a kernel."""


def declaration(name: str) -> str:
    """A kernel's variable, once a file."""
    return f"static nvgemm_aot::Handle {name}{{nvgemm_aot::kNotAsked}};"


def condition(name: str, kernel_id: str, origin: str, a: str, b: str, out: str) -> str:
    """A condition that computes ``out = a @ b``, and is false where ATen must.

    Args:
        name: The kernel's variable.
        kernel_id: The kernel.
        origin: The distribution that brought it, for the warning where it is missing.
        a: C++ expression for the first operand.
        b: For the second.
        out: For the result.
    """
    quoted = origin.replace("\\", "\\\\").replace('"', '\\"')
    return f'nvgemm_aot::gemm({a}, {b}, {out}, "{kernel_id}", "{quoted}", {name})'
