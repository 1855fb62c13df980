/*
 * hot call|put|copy TIMES BYTES FILE: reads the start of a file by pread (call), writes it by pwrite (put), or copies as many bytes by
 * memcpy (copy), TIMES times. Prints how many reads and writes the kernel saw meanwhile.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Returns how many reads and writes the kernel has counted for this process. */
static long calls(void)
{
    char text[512] = "";
    int fd = open("/proc/self/io", O_RDONLY);
    if (fd < 0 || read(fd, text, sizeof text - 1) <= 0)
        exit(3);
    close(fd);
    char *reads = strstr(text, "syscr: "), *writes = strstr(text, "syscw: ");
    return reads && writes ? atol(reads + 7) + atol(writes + 7) : -1;
}

int main(int count, char **arguments)
{
    static char from[4096], to[4096];
    if (count != 5)
        return 2;
    long times = atol(arguments[2]);
    size_t bytes = (size_t)atol(arguments[3]);
    int puts = strcmp(arguments[1], "put") == 0;
    int fd = open(arguments[4], puts ? O_RDWR : O_RDONLY);
    /* With the first read the library learns of the file. */
    if (bytes > sizeof to || fd < 0 || pread(fd, to, bytes, 0) != (ssize_t)bytes)
        return 4;
    long before = calls();
    if (strcmp(arguments[1], "copy") == 0) {
        for (long n = 0; n < times; n++) {
            memcpy(to, from, bytes);
            /* The program does not use the copied bytes. Without this barrier the compiler could remove the copies. */
            __asm__ volatile("" : : "r"(to), "r"(from) : "memory");
        }
    } else if (puts) {
        for (long n = 0; n < times; n++)
            if (pwrite(fd, from, bytes, 0) != (ssize_t)bytes)
                return 6;
    } else {
        for (long n = 0; n < times; n++)
            if (pread(fd, to, bytes, 0) != (ssize_t)bytes)
                return 5;
    }
    printf("%ld\n", calls() - before);
    return 0;
}
