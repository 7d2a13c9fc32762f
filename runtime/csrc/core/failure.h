// Internal exception, translated at each boundary (TVM-FFI, torch).

#ifndef NVGEMM_RUNTIME_CSRC_FAILURE_H_
#define NVGEMM_RUNTIME_CSRC_FAILURE_H_

#include <exception>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace nvgemm {

// Python exception class names; native.py registers torch's and this package's with TVM-FFI.
inline constexpr char kValueError[] = "ValueError";
inline constexpr char kTypeError[] = "TypeError";
inline constexpr char kRuntimeError[] = "RuntimeError";
inline constexpr char kOutOfMemoryError[] = "OutOfMemoryError";
inline constexpr char kNoKernelError[] = "NoKernelError";
inline constexpr char kDriverError[] = "DriverError";

class Failure : public std::exception {
 public:
  Failure(std::string kind, std::string message)
      : kind_(std::move(kind)), message_(std::move(message)) {}

  const char* kind() const noexcept { return kind_.c_str(); }
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  std::string kind_;
  std::string message_;
};

namespace internal {
template <typename Part>
void Append(std::string* text, const Part& part) {
  if constexpr (std::is_integral_v<Part>) {
    text->append(std::to_string(part));
  } else {
    text->append(std::string_view(part));
  }
}
}  // namespace internal

// Concatenates texts and integers.
template <typename... Parts>
std::string Text(const Parts&... parts) {
  std::string text;
  (internal::Append(&text, parts), ...);
  return text;
}

}  // namespace nvgemm

#endif  // NVGEMM_RUNTIME_CSRC_FAILURE_H_
