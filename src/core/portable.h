/* Macros for code that C, C++ and CUDA compilers share.
 *
 * FDSL_HD    starts an inline function for host and device.
 * FDSL_C_*   bracket declarations with C linkage, in headers that .cu files include. */
#ifndef FDSL_CORE_PORTABLE_H
#define FDSL_CORE_PORTABLE_H

#ifdef __CUDACC__
#define FDSL_HD static __host__ __device__ __forceinline__
#else
#define FDSL_HD static inline
#endif

#ifdef __cplusplus
#define FDSL_C_BEGIN extern "C" {
#define FDSL_C_END   }
#else
#define FDSL_C_BEGIN
#define FDSL_C_END
#endif

/* On x86-64 Linux, FDSL_FMA_CLONES before a function makes the host compiler generate two versions of it,
 * with and without FMA instructions. The dynamic linker picks one version at program start. Both versions
 * give the same bits, but in the version without FMA instructions every fmaf() is a library call. Under
 * sanitizers the macro is empty, because the dynamic linker picks a version before the sanitizers are
 * initialized. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define FDSL_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define FDSL_SANITIZED 1
#endif
#endif
#if defined(__x86_64__) && defined(__linux__) && !defined(FDSL_SANITIZED) && !defined(__CUDACC__)
#define FDSL_FMA_CLONES __attribute__((target_clones("default", "fma")))
#else
#define FDSL_FMA_CLONES
#endif

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))

#endif
