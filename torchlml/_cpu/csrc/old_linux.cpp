// Lets a kernel that was compiled on a new Linux load on an old one. Of what the kernels and torch's headers call, a
// few functions are bound to their newest versions when they are linked, though an older version does the same. The
// linker sends these here (setup.py: `--wrap=NAME` makes of a call of NAME one of __wrap_NAME), and here the older is
// called.
#include <stdlib.h>  // defines __GLIBC__ where it is the one

#ifdef __GLIBC__

#include <new>
#include <sstream>

#if defined(__x86_64__)
#define LML_FIRST_GLIBC "GLIBC_2.2.5"
#else
#define LML_FIRST_GLIBC "GLIBC_2.17"  // aarch64
#endif

extern "C" {

// New in glibc 2.29: they leave errno alone.
double first_exp(double);
double first_log(double);
__asm__(".symver first_exp,exp@" LML_FIRST_GLIBC);
__asm__(".symver first_log,log@" LML_FIRST_GLIBC);
double __wrap_exp(double x) { return first_exp(x); }
double __wrap_log(double x) { return first_log(x); }

// New in GCC 9: constructors without the argument that has a default.
void __wrap__ZNSt7__cxx1118basic_stringstreamIcSt11char_traitsIcESaIcEEC1Ev(void* self) {
  new (self) std::stringstream(std::ios_base::in | std::ios_base::out);
}
void __wrap__ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev(void* self) {
  new (self) std::ostringstream(std::ios_base::out);
}

// New in glibc 2.32: whether there is but one thread, so that references can be counted without atomic instructions.
// There may always be several.
extern __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;

}  // extern "C"

#endif
