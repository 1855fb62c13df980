/*
 * own_mask FILE...: reads the files in turn until the library has narrowed the thread's CPUs, which lie on different nodes, and then reads
 * its CPUs by syscall(2). The program must see the CPUs that it had at its start. The same for a mask that it sets by syscall(2).
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Writes the kernel's list of this thread's CPUs. Only the calls that the library knows restore it. */
static void list(char to[64]) {
    char text[8192] = "";
    int fd = open("/proc/thread-self/status", O_RDONLY);
    if (fd < 0 || read(fd, text, sizeof text - 1) <= 0) _exit(3);
    close(fd);
    char *found = strstr(text, "Cpus_allowed_list:");
    if (!found || sscanf(found, "Cpus_allowed_list: %63s", to) != 1) _exit(4);
}

/* Reads the files until the thread's CPUs differ from `all`. */
static int is_narrowed(int *fds, int count, const char *all) {
    static char page[65536];
    char now[64];
    for (int round = 0; round < 100000; round++) {
        if (pread(fds[round % count], page, sizeof page, 0) != sizeof page) _exit(5);
        list(now);
        if (strcmp(now, all) != 0) return 1;
    }
    return 0;
}

int main(int count, char **files) {
    int fds[8];
    char all[64];
    cpu_set_t before, after;
    if (count < 2 || count > 9 || sched_getaffinity(0, sizeof before, &before) != 0) return 2;
    for (int i = 1; i < count; i++)
        if ((fds[i - 1] = open(files[i], O_RDONLY)) < 0) return 2;
    list(all);
    if (!is_narrowed(fds, count - 1, all)) return puts("never narrowed"), 6;
    CPU_ZERO(&after);
    if (syscall(SYS_sched_getaffinity, 0, sizeof after, &after) <= 0) return 7;
    if (!CPU_EQUAL(&before, &after)) return puts("saw the narrow mask"), 8;

    /* It sets the very mask that the library has set. A new mask of the library's must not replace it later. */
    if (!is_narrowed(fds, count - 1, all)) return puts("never narrowed again"), 9;
    char narrow[64], own[64];
    list(narrow);
    cpu_set_t one;
    CPU_ZERO(&one);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        char name[16];
        sprintf(name, "%d", cpu);
        if (strcmp(name, narrow) == 0) CPU_SET(cpu, &one);
    }
    if (CPU_COUNT(&one) != 1) return puts("the narrow mask is not one CPU"), 10;
    if (syscall(SYS_sched_setaffinity, 0, sizeof one, &one) != 0) return 11;
    /* Calls that restore a mask of the library's. */
    if (sched_getaffinity(0, sizeof after, &after) != 0 || !CPU_EQUAL(&one, &after)) return puts("lost its own mask"), 12;
    list(own);
    if (strcmp(own, narrow) != 0) return puts("lost its own mask"), 13;
    puts("own");
    return 0;
}
