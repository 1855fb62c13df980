/*
 * An ordinary program with any number of threads on one file.
 *
 *   crowd read|apart|together|append THREADS SECONDS FILE
 *   crowd idle PROCESSES FILE
 *
 * Prints the operations per second of all threads together. `read`: 4 KiB at random. `apart`: writes of 8 KiB, each thread
 * in a part of its own of the file. `together`: the same, all in the first 64 KiB, at 8 KiB boundaries. `append`: writes of
 * 4 KiB at the end of the file, which is emptied when it has 64 MiB; the time to empty it is not measured.
 * `idle` starts processes that each read and write the file once, and then wait until standard input ends. It prints
 * "ready" when all of them wait.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, APPEND_BYTES = 64 << 20, WARM = 500 };

enum work { READ, APART, TOGETHER, APPEND };

static enum work work;
static int threads;
static double seconds, used;
static const char *file;
static uint64_t blocks, part;
static pthread_barrier_t line;
static atomic_int stop;
static atomic_long left;
static atomic_ulong sum;

static void die(const char *what)
{
    fprintf(stderr, "crowd: %s: %s\n", what, strerror(errno));
    exit(1);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void operate(int fd, long number, char *buffer, uint64_t *random)
{
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    uint64_t which = *random >> 32;
    ssize_t moved, wanted = 2 * PAGE;
    switch (work) {
    case READ:
        wanted = PAGE;
        moved = pread(fd, buffer, PAGE, (off_t)((which * blocks >> 32) * PAGE));
        break;
    case APART: moved = pwrite(fd, buffer, 2 * PAGE, (off_t)(((uint64_t)number * part + (which * part >> 32)) * 2 * PAGE)); break;
    default: moved = pwrite(fd, buffer, 2 * PAGE, (off_t)((which & 7) << 13));
    }
    if (moved != wanted)
        die(file);
}

static void append(long number, const char *buffer)
{
    int fd = open(file, O_WRONLY | O_APPEND);
    if (fd < 0)
        die(file);
    /* The first round warms up and is not measured. */
    for (int counted = 0; used < seconds; counted = 1) {
        if (number == 0) {
            if (ftruncate(fd, 0) != 0)
                die(file);
            left = APPEND_BYTES / PAGE;
        }
        pthread_barrier_wait(&line);
        double begun = now();
        while (atomic_fetch_sub(&left, 1) > 0)
            if (write(fd, buffer, PAGE) != PAGE)
                die(file);
        pthread_barrier_wait(&line);
        double ended = now();
        if (number == 0 && counted) {
            used += ended - begun;
            sum += APPEND_BYTES / PAGE;
        }
        pthread_barrier_wait(&line);
    }
    close(fd);
}

static void *run(void *argument)
{
    long number = (long)(intptr_t)argument;
    char *buffer = aligned_alloc(PAGE, 2 * PAGE);
    if (!buffer)
        die("memory");
    memset(buffer, 'a' + (int)(number % 26), 2 * PAGE);
    if (work == APPEND) {
        append(number, buffer);
        return NULL;
    }
    int fd = open(file, work == READ ? O_RDONLY : O_RDWR);
    if (fd < 0)
        die(file);
    uint64_t random = 0x9e3779b97f4a7c15u * (uint64_t)(number + 1), done = 0;
    for (int n = 0; n < WARM; n++)
        operate(fd, number, buffer, &random);
    pthread_barrier_wait(&line);
    while (!stop) {
        operate(fd, number, buffer, &random);
        done++;
    }
    sum += done;
    return NULL;
}

static int idle(int processes)
{
    int ready[2];
    if (pipe(ready) != 0)
        die("pipe");
    pid_t *children = calloc((size_t)processes, sizeof *children);
    for (int n = 0; n < processes; n++) {
        children[n] = fork();
        if (children[n] < 0)
            die("fork");
        if (children[n] > 0)
            continue;
        char page[PAGE];
        int fd = open(file, O_RDWR);
        for (int k = 0; k < WARM; k++)
            if (fd < 0 || pread(fd, page, PAGE, 0) != PAGE || pwrite(fd, page, PAGE, 0) != PAGE)
                die(file);
        if (write(ready[1], "r", 1) != 1)
            die("pipe");
        for (;;)
            pause();
    }
    char byte;
    for (int n = 0; n < processes; n++)
        if (read(ready[0], &byte, 1) != 1)
            die("pipe");
    puts("ready");
    fflush(stdout);
    while (read(0, &byte, 1) > 0)
        ;
    for (int n = 0; n < processes; n++)
        kill(children[n], SIGKILL);
    while (wait(NULL) > 0)
        ;
    return 0;
}

int main(int count, char **arguments)
{
    if (count == 4 && strcmp(arguments[1], "idle") == 0) {
        file = arguments[3];
        return idle(atoi(arguments[2]));
    }
    if (count != 5) {
        fprintf(stderr, "usage: crowd read|apart|together|append THREADS SECONDS FILE\n");
        return 2;
    }
    const char *works[] = {"read", "apart", "together", "append"};
    while (work < APPEND && strcmp(arguments[1], works[work]) != 0)
        work++;
    threads = atoi(arguments[2]);
    seconds = strtod(arguments[3], NULL);
    file = arguments[4];
    struct stat about;
    if (work != APPEND && stat(file, &about) != 0)
        die(file);
    blocks = work == APPEND ? 0 : (uint64_t)about.st_size / PAGE;
    part = threads < 1 ? 0 : blocks / 2 / (uint64_t)threads;
    if (threads < 1 || (work == APART && part == 0))
        return 2;
    pthread_t *ids = calloc((size_t)threads, sizeof *ids);
    pthread_barrier_init(&line, NULL, (unsigned)threads + (work != APPEND));
    for (long n = 0; n < threads; n++)
        if (pthread_create(&ids[n], NULL, run, (void *)(intptr_t)n) != 0)
            die("thread");
    if (work != APPEND) {
        pthread_barrier_wait(&line);
        double begun = now();
        struct timespec rest = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
        nanosleep(&rest, NULL);
        stop = 1;
        /* Measures until the last thread has ended, because a thread that waits for its turn is still in an operation. */
        for (int n = 0; n < threads; n++)
            pthread_join(ids[n], NULL);
        used = now() - begun;
    } else {
        for (int n = 0; n < threads; n++)
            pthread_join(ids[n], NULL);
    }
    printf("%.1f\n", (double)sum / used);
    return 0;
}
