// Binds dlopen and related functions to symbol versions that every glibc has. glibc 2.34 moved them
// under new versions, which would keep a library built there from loading elsewhere.

#ifndef NVGEMM_RUNTIME_CSRC_DYNAMIC_LOADING_H_
#define NVGEMM_RUNTIME_CSRC_DYNAMIC_LOADING_H_

#include <dlfcn.h>

#if defined(__x86_64__) && defined(__GLIBC__)
__asm__(".symver dlopen, dlopen@GLIBC_2.2.5");
__asm__(".symver dlclose, dlclose@GLIBC_2.2.5");
__asm__(".symver dlsym, dlsym@GLIBC_2.2.5");
__asm__(".symver dlerror, dlerror@GLIBC_2.2.5");
__asm__(".symver dlinfo, dlinfo@GLIBC_2.3.3");
#elif defined(__aarch64__) && defined(__GLIBC__)
// All functions in the port's first glibc have this version.
__asm__(".symver dlopen, dlopen@GLIBC_2.17");
__asm__(".symver dlclose, dlclose@GLIBC_2.17");
__asm__(".symver dlsym, dlsym@GLIBC_2.17");
__asm__(".symver dlerror, dlerror@GLIBC_2.17");
__asm__(".symver dlinfo, dlinfo@GLIBC_2.17");
#endif

#endif  // NVGEMM_RUNTIME_CSRC_DYNAMIC_LOADING_H_
