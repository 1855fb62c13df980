/*
 * An ordinary program that reads or writes blocks in a tight loop, through calls or through a mapping.
 *
 *   access call|map read|write random|sequential|hot BLOCK SECONDS FILE...
 *   access call write append BLOCK SECONDS FILE...
 *
 * One thread for each FILE; a file may be given twice. Prints operations a second of all threads together. `map`
 * copies between the mapped file and a buffer, at the offsets that `call` would use: the bare cost of the copy.
 * `append` writes a new file again and again; making and removing it is not counted.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { BATCH = 256, APPEND_BYTES = 64 << 20 };

static int by_map, writing, random_order, hot, appending;
static size_t block;
static double seconds;
static pthread_barrier_t start;

struct job {
    const char *file;
    uint64_t seed;
    double per_second;
};

static void die(const char *what)
{
    fprintf(stderr, "access: %s: %s\n", what, strerror(errno));
    exit(1);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void append(struct job *job, const char *buffer)
{
    double used = 0;
    uint64_t done = 0;
    while (used < seconds) {
        int fd = open(job->file, O_WRONLY | O_CREAT | O_EXCL, 0666);
        if (fd < 0)
            die(job->file);
        double begun = now();
        for (size_t at = 0; at + block <= APPEND_BYTES; at += block, done++)
            if (write(fd, buffer, block) != (ssize_t)block)
                die(job->file);
        used += now() - begun;
        close(fd);
        if (unlink(job->file) != 0)
            die(job->file);
    }
    job->per_second = (double)done / used;
}

static void access_blocks(struct job *job, char *buffer)
{
    int fd = open(job->file, writing ? O_RDWR : O_RDONLY);
    struct stat about;
    if (fd < 0 || fstat(fd, &about) != 0)
        die(job->file);
    uint64_t blocks = (uint64_t)about.st_size / block;
    if (blocks == 0 || blocks >> 32)
        exit(2);
    char *map = NULL;
    if (by_map) {
        map = mmap(NULL, (size_t)about.st_size, PROT_READ | (writing ? PROT_WRITE : 0), MAP_SHARED | MAP_POPULATE, fd, 0);
        if (map == MAP_FAILED)
            die(job->file);
    }
    uint64_t random = job->seed, next = 0, done = 0;
    double begun = now(), used;
    do {
        for (int n = 0; n < BATCH; n++, done++) {
            uint64_t which;
            if (hot) {
                which = 0;
            } else if (random_order) {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                which = (random >> 32) * blocks >> 32;
            } else {
                which = next;
                next = next + 1 == blocks ? 0 : next + 1;
            }
            off_t at = (off_t)(which * block);
            if (map) {
                if (writing)
                    memcpy(map + at, buffer, block);
                else
                    memcpy(buffer, map + at, block);
                /* Nobody looks at the buffer: without this the copies could be left out. */
                __asm__ volatile("" : : "r"(buffer), "r"(map) : "memory");
            } else {
                ssize_t moved = writing ? pwrite(fd, buffer, block, at) : pread(fd, buffer, block, at);
                if (moved != (ssize_t)block)
                    die(job->file);
            }
        }
        used = now() - begun;
    } while (used < seconds);
    job->per_second = (double)done / used;
}

static void *run(void *argument)
{
    struct job *job = argument;
    char *buffer = aligned_alloc(4096, (block + 4095) / 4096 * 4096);
    if (!buffer)
        die("memory");
    memset(buffer, 0x5a, block);
    pthread_barrier_wait(&start);
    if (appending)
        append(job, buffer);
    else
        access_blocks(job, buffer);
    return NULL;
}

int main(int count, char **arguments)
{
    if (count < 7) {
        fprintf(stderr, "usage: access call|map read|write random|sequential|hot|append BLOCK SECONDS FILE...\n");
        return 2;
    }
    by_map = strcmp(arguments[1], "map") == 0;
    writing = strcmp(arguments[2], "write") == 0;
    random_order = strcmp(arguments[3], "random") == 0;
    hot = strcmp(arguments[3], "hot") == 0;
    appending = strcmp(arguments[3], "append") == 0;
    block = strtoul(arguments[4], NULL, 10);
    seconds = strtod(arguments[5], NULL);
    int threads = count - 6;
    struct job *jobs = calloc((size_t)threads, sizeof *jobs);
    pthread_t *ids = calloc((size_t)threads, sizeof *ids);
    if (!block || !jobs || !ids)
        return 2;
    pthread_barrier_init(&start, NULL, (unsigned)threads);
    for (int n = 0; n < threads; n++) {
        jobs[n].file = arguments[6 + n];
        jobs[n].seed = 0x9e3779b97f4a7c15u * (uint64_t)(n + 1);
        if (pthread_create(&ids[n], NULL, run, &jobs[n]) != 0)
            die("thread");
    }
    double sum = 0;
    for (int n = 0; n < threads; n++) {
        pthread_join(ids[n], NULL);
        sum += jobs[n].per_second;
    }
    printf("%.1f\n", sum);
    return 0;
}
