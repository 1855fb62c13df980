/*
 * hot_set HOT SCANNED TIMES: reads SCANNED once from start to end, in pieces of 128 KiB, past the library: the kernel sees each of
 * these reads. After each piece, reads TIMES pages of HOT at random. Prints how many reads of HOT there were, and how many of them
 * the kernel saw.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PAGE 4096

/* Returns how many reads the kernel has counted for this process. */
static long reads(void)
{
    char text[512] = "";
    int fd = open("/proc/self/io", O_RDONLY);
    if (fd < 0 || read(fd, text, sizeof text - 1) <= 0)
        exit(3);
    close(fd);
    char *found = strstr(text, "syscr: ");
    return found ? atol(found + 7) : -1;
}

/* Calls pread(2) past the library. */
static long kernel_pread(int fd, void *to, size_t bytes, off_t at)
{
#if defined __x86_64__
    register long fourth __asm__("r10") = at;
    long result = SYS_pread64;
    __asm__ volatile("syscall" : "+a"(result) : "D"((long)fd), "S"(to), "d"(bytes), "r"(fourth) : "rcx", "r11", "memory");
    return result;
#elif defined __aarch64__
    register long number __asm__("x8") = SYS_pread64;
    register long first __asm__("x0") = fd;
    register void *second __asm__("x1") = to;
    register size_t third __asm__("x2") = bytes;
    register long fourth __asm__("x3") = at;
    __asm__ volatile("svc 0" : "+r"(first) : "r"(number), "r"(second), "r"(third), "r"(fourth) : "memory");
    return first;
#endif
}

int main(int count, char **arguments)
{
    static char page[PAGE], chunk[128 << 10];
    if (count != 4)
        return 2;
    int hot = open(arguments[1], O_RDONLY), scanned = open(arguments[2], O_RDONLY);
    long times = atol(arguments[3]);
    struct stat of_hot, of_scanned;
    if (hot < 0 || scanned < 0 || fstat(hot, &of_hot) || fstat(scanned, &of_scanned))
        return 4;
    long pages = of_hot.st_size / PAGE, random = 1;
    /* From here on the whole hot set is in the cache, and the library knows the file. */
    for (long n = 0; n < pages; n++)
        if (pread(hot, page, PAGE, n * PAGE) != PAGE)
            return 5;
    long before = reads(), done = 0, chunks = 0;
    for (off_t at = 0; at < of_scanned.st_size; at += sizeof chunk, chunks++) {
        if (kernel_pread(scanned, chunk, sizeof chunk, at) <= 0)
            return 6;
        for (long n = 0; n < times; n++, done++) {
            random = (random * 1103515245 + 12345) & 0x7fffffff;
            if (pread(hot, page, PAGE, random / 8 % pages * PAGE) != PAGE)
                return 7;
        }
    }
    printf("%ld %ld\n", done, reads() - before - chunks);
    return 0;
}
