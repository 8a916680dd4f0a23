// Allows a kernel that was compiled on a recent Linux system to load on an older one. The kernels and torch's headers
// call a few functions that the linker would bind to their newest symbol versions, although an older version does the
// same. The linker option `--wrap=NAME` (see setup.py) redirects these calls to __wrap_NAME in this file, which calls
// the older version.
#include <stdlib.h>  // defines __GLIBC__ if the C library is glibc

#ifdef __GLIBC__

#include <new>
#include <sstream>

#if defined(__x86_64__)
#define LML_FIRST_GLIBC "GLIBC_2.2.5"
#else
#define LML_FIRST_GLIBC "GLIBC_2.17"  // aarch64
#endif

extern "C" {

// glibc 2.29 introduced versions of exp and log without the obsolete SVID error handling (matherr).
double first_exp(double);
double first_log(double);
__asm__(".symver first_exp,exp@" LML_FIRST_GLIBC);
__asm__(".symver first_log,log@" LML_FIRST_GLIBC);
double __wrap_exp(double x) { return first_exp(x); }
double __wrap_log(double x) { return first_log(x); }

// GCC 9 introduced separate default constructors for these classes. Older versions have only a constructor with an
// argument that has a default value.
void __wrap__ZNSt7__cxx1118basic_stringstreamIcSt11char_traitsIcESaIcEEC1Ev(void* self) {
  new (self) std::stringstream(std::ios_base::in | std::ios_base::out);
}
void __wrap__ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev(void* self) {
  new (self) std::ostringstream(std::ios_base::out);
}

// glibc 2.32 introduced this variable. It is nonzero if the process has a single thread, so that reference counts need
// no atomic instructions. Zero is always safe.
extern __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;

}  // extern "C"

#endif
