// dlopen and its kin, bound to the symbol versions that every glibc has: glibc 2.34 moved them and
// gave them new versions, which would keep a library that was built there from loading elsewhere.

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
// The port's first glibc: all of its functions of that time have this version.
__asm__(".symver dlopen, dlopen@GLIBC_2.17");
__asm__(".symver dlclose, dlclose@GLIBC_2.17");
__asm__(".symver dlsym, dlsym@GLIBC_2.17");
__asm__(".symver dlerror, dlerror@GLIBC_2.17");
__asm__(".symver dlinfo, dlinfo@GLIBC_2.17");
#endif

#endif  // NVGEMM_RUNTIME_CSRC_DYNAMIC_LOADING_H_
