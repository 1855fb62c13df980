/*
 * reader MILLISECONDS THREAD...: each THREAD is CPU,KIND,FILE. The thread begins on that CPU, reads that file from start to end again
 * and again, and then rests for two seconds. With KIND `free`, the thread may run on all CPUs once it has begun. With `own`, it
 * stays bound to its CPU. All threads begin together.
 *
 * Prints a line for each thread: its first CPUs with the bytes that it had read when it was seen there (CPU:BYTES,...), for
 * each CPU how often the thread was seen there in the second half of its time (CPU:TIMES,...), and the CPUs where it was allowed to
 * run before its first read, after its last read, and after its rest.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { CPUS = 64, PIECE = 64 << 10, STEPS = 100 };

struct reader {
    int cpu, own;
    const char *file;
    pthread_t thread;
    char told[8192];
};

static pthread_barrier_t together;
static long limit_ms;

static void fail(const char *what)
{
    perror(what);
    exit(3);
}

static long now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* Writes the list of CPUs where this thread may run, as the kernel has it. A call of sched_getaffinity would make the library restore
   the CPUs that a migration took away. */
static void allowed(char to[64])
{
    char text[8192] = "";
    int fd = open("/proc/thread-self/status", O_RDONLY);
    if (fd < 0 || read(fd, text, sizeof text - 1) <= 0)
        fail("/proc/thread-self/status");
    close(fd);
    char *found = strstr(text, "Cpus_allowed_list:");
    if (!found || sscanf(found, "Cpus_allowed_list: %63s", to) != 1)
        fail("Cpus_allowed_list");
}

static void *run(void *argument)
{
    struct reader *me = argument;
    char before[64], after[64], rested[64];
    long seen[CPUS] = {0}, bytes = 0;
    int steps = 0;
    char *buffer = malloc(PIECE);
    cpu_set_t all, one;

    if (!buffer || sched_getaffinity(0, sizeof all, &all))
        fail("sched_getaffinity");
    CPU_ZERO(&one);
    CPU_SET(me->cpu, &one);
    if (sched_setaffinity(0, sizeof one, &one))
        fail("sched_setaffinity");
    int fd = open(me->file, O_RDONLY);
    if (fd < 0)
        fail(me->file);
    pthread_barrier_wait(&together);
    if (!me->own && sched_setaffinity(0, sizeof all, &all))
        fail("sched_setaffinity");
    allowed(before);

    int last = -1;
    size_t told = 0;
    long begin = now_ms(), passed = 0;
    for (off_t at = 0; passed < limit_ms; passed = now_ms() - begin) {
        int cpu = sched_getcpu();
        if (cpu != last && steps++ < STEPS)
            told += (size_t)sprintf(me->told + told, "%d:%ld,", cpu, bytes);
        last = cpu;
        if (passed > limit_ms / 2 && cpu >= 0 && cpu < CPUS)
            seen[cpu]++;
        ssize_t got = pread(fd, buffer, PIECE, at);
        if (got < 0)
            fail("pread");
        at = got < PIECE ? 0 : at + got;
        bytes += got;
    }
    allowed(after);
    sleep(2);
    close(fd);
    allowed(rested);

    told += (size_t)sprintf(me->told + told, " ");
    for (int cpu = 0; cpu < CPUS; cpu++)
        if (seen[cpu])
            told += (size_t)sprintf(me->told + told, "%d:%ld,", cpu, seen[cpu]);
    sprintf(me->told + told, " %s %s %s", before, after, rested);
    free(buffer);
    return NULL;
}

int main(int count, char **arguments)
{
    int threads = count - 2;
    if (threads < 1)
        return 2;
    struct reader *readers = calloc((size_t)threads, sizeof *readers);
    limit_ms = atol(arguments[1]);
    pthread_barrier_init(&together, NULL, (unsigned)threads);
    for (int n = 0; n < threads; n++) {
        char *cpu = strtok(arguments[n + 2], ","), *kind = strtok(NULL, ","), *file = strtok(NULL, ",");
        if (!readers || !file)
            return 2;
        readers[n] = (struct reader){.cpu = atoi(cpu), .own = strcmp(kind, "own") == 0, .file = file};
        if (pthread_create(&readers[n].thread, NULL, run, &readers[n]))
            return 4;
    }
    for (int n = 0; n < threads; n++) {
        pthread_join(readers[n].thread, NULL);
        puts(readers[n].told);
    }
    return 0;
}
