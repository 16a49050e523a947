// Libraries that contain the CUDA runtime instead of linking to it (CuPy's wheels): their copy is made to jump here.
#define _GNU_SOURCE
#include "virtual_gpu.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

// Make each function at base + offsets[i] jump to targets[i].  The code must not be running yet.
int stalloc_virtual_redirect(char *base, size_t num, const uint64_t *offsets, void *const *targets) {
#if defined(__x86_64__)
    enum { JUMP_BYTES = 12 }; // movabs rax, target; jmp rax
#elif defined(__aarch64__)
    enum { JUMP_BYTES = 16 }; // ldr x16, .+8; br x16; target
#else
    enum { JUMP_BYTES = 0 };
#endif
    if (num == 0) return SUCCESS;
    if (JUMP_BYTES == 0) return NOT_SUPPORTED;
    uint64_t low = UINT64_MAX, high = 0;
    for (size_t i = 0; i < num; i++) {
        if (offsets[i] < low) low = offsets[i];
        if (offsets[i] + JUMP_BYTES > high) high = offsets[i] + JUMP_BYTES;
    }
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *start = (char *)((size_t)(base + low) & ~(page - 1)), *end = (char *)round_up((size_t)(base + high), page);
    if (mprotect(start, (size_t)(end - start), PROT_READ | PROT_WRITE)) return NOT_SUPPORTED;
    for (size_t i = 0; i < num; i++) {
        unsigned char *at = (unsigned char *)base + offsets[i];
#if defined(__x86_64__)
        memcpy(at, "\x48\xb8", 2);
        memcpy(at + 2, &targets[i], 8);
        memcpy(at + 10, "\xff\xe0", 2);
#elif defined(__aarch64__)
        const uint32_t jump[2] = {0x58000050, 0xd61f0200};
        memcpy(at, jump, 8);
        memcpy(at + 8, &targets[i], 8);
#endif
    }
    __builtin___clear_cache(start, end);
    return mprotect(start, (size_t)(end - start), PROT_READ | PROT_EXEC) ? NOT_SUPPORTED : SUCCESS;
}
