/*
 * An ordinary program that reads or writes blocks in a tight loop, through calls or through a mapping.
 *
 *   access call|map read|write random|sequential|hot BLOCK SECONDS FILE...
 *   access table read random|sequential|hot BLOCK SECONDS FILE...
 *   access call write append BLOCK SECONDS FILE...
 *
 * Runs one thread for each FILE; a file may be given twice. Prints the operations per second of all threads together.
 * `map` copies between the mapped file and a buffer, at the offsets that `call` would use: the cost of the copy alone.
 * `table` copies from pages that it looks up in a table shaped like a slice's (docs/formats/shm.md), and validates each
 * lookup after the copy. Every cache in shared memory must do that. `table` handles no descriptors and keeps no counters.
 * `append` writes a new file repeatedly. The time to create and remove the file is not measured.
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

enum { PAGE = 4096, WAYS = 4, HUGE = 2 << 20, VALID = 1 << 26 };

static int by_map, by_table, writing, random_order, hot, appending;
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

struct entry {
    volatile uint64_t key, state;
};

struct table {
    uint64_t lines, bytes;
    struct entry *entries;
    volatile uint8_t *used;
    char *frames;
};

static void *huge(size_t bytes)
{
    char *memory = mmap(NULL, bytes + HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        die("memory");
    memory += HUGE - ((uintptr_t)memory & (HUGE - 1));
    madvise(memory, bytes, MADV_HUGEPAGE);
    return memory;
}

static uint64_t home_line(const struct table *table, uint64_t key)
{
    uint64_t hash = key >> 2;
    hash = (hash ^ (hash >> 32)) * 0x9e3779b97f4a7c15u;
    hash = (hash ^ (hash >> 29)) * 0xbf58476d1ce4e5b9u;
    hash ^= hash >> 32;
    return (uint64_t)((unsigned __int128)hash * table->lines >> 64);
}

static uint64_t key_of(uint64_t page)
{
    return 1ull << 34 | page;
}

/* Fills a table that is as large as for a cache of eight times the file. */
static struct table fill_table(int fd, const char *file, uint64_t bytes)
{
    uint64_t pages = bytes / PAGE;
    struct table table = {.lines = 8 * pages * 3 / 2 / WAYS, .bytes = pages * PAGE};
    table.entries = huge(table.lines * WAYS * sizeof *table.entries);
    table.used = calloc(table.lines, WAYS);
    table.frames = huge(table.bytes);
    if (!table.used)
        die("memory");
    for (uint64_t page = 0; page < pages; page++) {
        if (pread(fd, table.frames + page * PAGE, PAGE, (off_t)(page * PAGE)) != PAGE)
            die(file);
        uint64_t line = home_line(&table, key_of(page)), way = 0;
        while (table.entries[line * WAYS + way].key)
            if (++way == WAYS) {
                way = 0;
                line = line + 1 == table.lines ? 0 : line + 1;
            }
        table.entries[line * WAYS + way].key = key_of(page);
        table.entries[line * WAYS + way].state = VALID | page;
    }
    return table;
}

/* Copies a page. Returns 0 if the page changed during the copy, which never happens here. */
static __attribute__((noinline)) int copy_page(const struct table *table, uint64_t at, char *buffer, size_t bytes)
{
    if (at + bytes > table->bytes)
        return 0;
    uint64_t key = key_of(at / PAGE), line = home_line(table, key);
    for (;; line = line + 1 == table->lines ? 0 : line + 1) {
        struct entry *entry = table->entries + line * WAYS;
        entry += (entry[1].key == key) + 2 * (entry[2].key == key) + 3 * (entry[3].key == key);
        uint64_t state = entry->state;
        if (entry->key != key)
            continue;
        if (!(state & VALID))
            return 0;
        memcpy(buffer, table->frames + (state & (VALID - 1)) * PAGE + at % PAGE, bytes);
        __asm__ volatile("" : : : "memory");
        if (entry->state != state)
            return 0;
        uint64_t index = (uint64_t)(entry - table->entries);
        if (!table->used[index])
            table->used[index] = 1;
        return 1;
    }
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
    struct table table = {0};
    if (by_table && (writing || block > PAGE || PAGE % block))
        exit(2);
    if (by_table)
        table = fill_table(fd, job->file, (uint64_t)about.st_size);
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
                /* No code reads the buffer. Without this, the compiler could omit the copies. */
                __asm__ volatile("" : : "r"(buffer), "r"(map) : "memory");
            } else if (by_table) {
                if (!copy_page(&table, (uint64_t)at, buffer, block))
                    die("table");
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
        fprintf(stderr, "usage: access call|map|table read|write random|sequential|hot|append BLOCK SECONDS FILE...\n");
        return 2;
    }
    by_map = strcmp(arguments[1], "map") == 0;
    by_table = strcmp(arguments[1], "table") == 0;
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
