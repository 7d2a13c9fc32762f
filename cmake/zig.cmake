# Builds the native part with the compiler of the package ziglang, against glibc 2.28, for the processor
# that NVGEMM_ZIG_PROCESSOR names: x86_64 or aarch64. `wheels/release` uses it and writes the wrapper that
# NVGEMM_ZIG_CXX names, because CMake takes a compiler of one word.
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES NVGEMM_ZIG_PROCESSOR NVGEMM_ZIG_CXX)
if(NOT NVGEMM_ZIG_PROCESSOR MATCHES "^(x86_64|aarch64)$")
  message(FATAL_ERROR "NVGEMM_ZIG_PROCESSOR is '${NVGEMM_ZIG_PROCESSOR}'; it must be x86_64 or aarch64")
endif()
if(NOT NVGEMM_ZIG_PROCESSOR STREQUAL CMAKE_HOST_SYSTEM_PROCESSOR)
  set(CMAKE_SYSTEM_NAME Linux)
  set(CMAKE_SYSTEM_PROCESSOR "${NVGEMM_ZIG_PROCESSOR}")
endif()
set(CMAKE_CXX_COMPILER "${NVGEMM_ZIG_CXX}")
# The oldest processor of each kind, and a library without debugging information.
if(NVGEMM_ZIG_PROCESSOR STREQUAL "aarch64")
  set(baseline "generic")
else()
  set(baseline "x86_64")
endif()
set(CMAKE_CXX_FLAGS_INIT "-target ${NVGEMM_ZIG_PROCESSOR}-linux-gnu.2.28 -mcpu=${baseline}")
set(CMAKE_MODULE_LINKER_FLAGS_INIT "-s")
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
