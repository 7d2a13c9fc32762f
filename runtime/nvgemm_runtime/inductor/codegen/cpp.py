"""C++ that calls bundled kernels, for cpp_wrapper modules and AOTInductor packages.

A call goes through torch's dispatcher to ``nvgemm_aot::try_gemm``, which returns True if the kernel
computed. If it did not, or the native launcher is not loaded, the stock ATen call runs. So a
package loads and computes correctly without nvgemm-aot.

A dispatch table is data in the generated file and is looked up there. It needs no further operator,
and row counts that ATen computes cost no operator call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ...gemm.roles import Role
from ...launch.loading.native import CALLED_ABI
from ...matching.thresholds import ATEN, DispatchTable

_NOT_EXTRAS = (Role.A, Role.B, Role.ROWS, Role.SUMS, Role.OUT)
_EXTRAS = tuple(role.value for role in Role if role not in _NOT_EXTRAS)
"""Kernel operands other than A and B, in ``try_gemm``'s argument order. No ATen operator takes
rows or returns sums."""

LIBRARY_SONAME = "libnvgemm_aot.so"
"""Soname of the native launcher, set in runtime/csrc/CMakeLists.txt."""

HEADER = f"""
#ifndef NVGEMM_AOT_IN_THIS_FILE
#define NVGEMM_AOT_IN_THIS_FILE
#include <dlfcn.h>
#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

namespace nvgemm_aot {{
// A kernel's handle in this process: not requested yet, missing, or a number for try_gemm.
constexpr int64_t kNotRequested = -2;
constexpr int64_t kMissing = -1;
struct Kernel {{
    std::atomic<int64_t> handle{{kNotRequested}};
}};

// Returns true if the operators for this code are loaded. Torch would log an error for a lookup.
// Static, because packages in one process would share an inline function's result.
static inline bool has_operators() {{
    static const bool is_loaded = [] {{
        void* library = dlopen("{LIBRARY_SONAME}", RTLD_NOLOAD | RTLD_LAZY);
        if (library == nullptr) return false;
        void* abi = dlsym(library, "nvgemm_aot_operators_abi");
        return abi != nullptr && reinterpret_cast<int64_t (*)()>(abi)() == {CALLED_ABI};
    }}();
    return is_loaded;
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

// An operator's optional argument: nothing, or a value that the callee frees.
inline StableIValue optional_value(AtenTensorHandle tensor) {{
    if (tensor == nullptr) return 0;
    return reinterpret_cast<StableIValue>(new StableIValue(tensor_value(tensor)));
}}

// A kernel's operands other than A and B, or nullptr.
struct Extras {{
    AtenTensorHandle {", ".join(_EXTRAS)};
}};

// Holds no lock, because preparing calls Python and waits for its lock.
inline int64_t prepare(const char* id, const char* origin, Kernel& kernel) {{
    int64_t handle = kernel.handle.load(std::memory_order_acquire);
    if (handle == kNotRequested) {{
        StableIValue stack[2] = {{string_value(id), string_value(origin)}};
        AOTI_TORCH_ERROR_CODE_CHECK(
            torch_call_dispatcher("nvgemm_aot::prepare", "", stack, TORCH_ABI_VERSION));
        handle = static_cast<int64_t>(stack[0]);
        kernel.handle.store(handle, std::memory_order_release);
    }}
    return handle;
}}

// Computes out = a @ b with the extras by a kernel. Returns false, without effect, if it cannot.
inline bool gemm(AtenTensorHandle a, AtenTensorHandle b, AtenTensorHandle out, const Extras& extras,
                 const char* id, const char* origin, Kernel& kernel) {{
    if (!has_operators()) return false;
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
    AOTI_TORCH_ERROR_CODE_CHECK(
        torch_call_dispatcher("nvgemm_aot::try_gemm", "", stack, TORCH_ABI_VERSION));
    return static_cast<bool>(stack[0]);
}}

// A kernel's id and origin.
struct Name {{
    const char* id;
    const char* origin;
}};

// Dispatch table: kernels by A's row count.
constexpr int kAten = -1;
template <int kBounds, int kKernels>
struct Table {{
    int64_t bounds[kBounds];  // ascending: first row count of each segment after the first
    int indices[kBounds + 1];  // each segment's kernel index, or kAten
    Name names[kKernels];
    Kernel kernels[kKernels];
    std::atomic<bool> is_prepared{{false}};
}};

// Computes gemm by the table's kernel for A's row count.
template <int kBounds, int kKernels>
bool gemm_by_rows(AtenTensorHandle a, AtenTensorHandle b, AtenTensorHandle out,
                  const Extras& extras, Table<kBounds, kKernels>& table) {{
    int64_t rank = 0;
    int64_t* sizes = nullptr;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(a, &rank));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(a, &sizes));
    if (rank < 2 || !has_operators()) return false;
    if (!table.is_prepared.load(std::memory_order_acquire)) {{
        // At the first call, for all rows, so that no kernel loads during serving or capture.
        for (int i = 0; i < kKernels; ++i) {{
            prepare(table.names[i].id, table.names[i].origin, table.kernels[i]);
        }}
        table.is_prepared.store(true, std::memory_order_release);
    }}
    const int64_t* above =
        std::upper_bound(std::begin(table.bounds), std::end(table.bounds), sizes[rank - 2]);
    const int index = table.indices[above - std::begin(table.bounds)];
    if (index == kAten) return false;
    const Name& name = table.names[index];
    return gemm(a, b, out, extras, name.id, name.origin, table.kernels[index]);
}}
}}  // namespace nvgemm_aot
#endif
"""
"""Precedes every kernel call in a generated file. May appear twice, because torch assembles files
from parts."""


@dataclass(frozen=True, kw_only=True)
class Operands:
    """Tensors of a call, as C++ expressions.

    Attributes:
        a, b, out: Matrices.
        extras: Other operands, by `roles.Role`.
    """

    a: str
    b: str
    out: str
    extras: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Returns the first arguments of the header's functions."""
        extras = ", ".join(self.extras.get(role, "nullptr") for role in _EXTRAS)
        return f"{self.a}, {self.b}, {self.out}, {{{extras}}}"


def declaration(name: str) -> str:
    """Returns the definition of a kernel's variable. Like the header, it may appear twice."""
    return _guarded(name, f"static nvgemm_aot::Kernel {name};")


def condition(name: str, kernel_id: str, origin: str, operands: Operands) -> str:
    """Returns a condition that computes ``out = a @ b``, and is false if the kernel cannot."""
    return f"nvgemm_aot::gemm({operands}, {_quoted(kernel_id)}, {_quoted(origin)}, {name})"


def table_declaration(name: str, table: DispatchTable, origins: Mapping[str, str]) -> str:
    """Returns the definition of a table's variable. Like the header, it may appear twice.

    Args:
        name: Variable name.
        table: Dispatch table with at least one bound and one kernel.
        origins: Source of each kernel, by kernel id.
    """
    indices = ["nvgemm_aot::kAten" if k == ATEN else table.used.index(k) for k in table.kernels]
    names = [_braced([_quoted(kernel_id), _quoted(origins[kernel_id])]) for kernel_id in table.used]
    kind = f"nvgemm_aot::Table<{len(table.bounds)}, {len(names)}>"
    rows = [_braced(map(str, table.bounds)), _braced(map(str, indices)), _braced(names)]
    return _guarded(name, f"static {kind} {name}{_braced(rows)};")


def table_condition(name: str, operands: Operands) -> str:
    """Returns a condition like `condition`, for the table's kernel at A's row count."""
    return f"nvgemm_aot::gemm_by_rows({operands}, {name})"


def _guarded(name: str, definition: str) -> str:
    guard = f"NVGEMM_AOT_HAS_{name}"
    return f"#ifndef {guard}\n#define {guard}\n{definition}\n#endif\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _braced(items: Iterable[str]) -> str:
    return "{" + ", ".join(items) + "}"
