/* Threads on one description, and the cancellation of a thread by another. */
#include "check.h"
#include <pthread.h>
#include <stdatomic.h>

#define RECORD 100
#define RECORDS 3000
#define THREADS 4

static int shared;
static atomic_int taken[RECORDS];

/* Each record goes to one reader: a read moves the offset and reads in one step. */
static void *takes(void *unused) {
    (void)unused;
    unsigned char record[RECORD];
    for (;;) {
        ssize_t count = read(shared, record, RECORD);
        if (count == 0) return NULL;
        CHECK(count == RECORD);
        int number;
        memcpy(&number, record, sizeof number);
        CHECK(number >= 0 && number < RECORDS);
        taken[number]++;
    }
}

static void records(void) {
    int fd = open("records", O_RDWR | O_CREAT | O_TRUNC, 0600);
    for (int i = 0; i < RECORDS; i++) {
        unsigned char record[RECORD] = {0};
        memcpy(record, &i, sizeof i);
        CHECK(write(fd, record, RECORD) == RECORD);
    }
    CHECK(lseek(fd, 0, SEEK_SET) == 0);
    shared = fd;
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], NULL, takes, NULL) == 0);
    for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    for (int i = 0; i < RECORDS; i++) CHECK(taken[i] == 1);
    CHECK(close(fd) == 0);
    done("records");
}

/* Writers that append: none overwrites another's bytes. */
static void *appends(void *number) {
    char line[17];
    int fd = open("lines", O_WRONLY | O_APPEND);
    CHECK(fd >= 0);
    for (int i = 0; i < 300; i++) {
        snprintf(line, sizeof line, "%03d %011d\n", (int)(long)number, i);
        CHECK(write(fd, line, 16) == 16);
    }
    CHECK(close(fd) == 0);
    return NULL;
}

static void appended(void) {
    int fd = open("lines", O_RDWR | O_CREAT | O_TRUNC, 0600);
    pthread_t threads[THREADS];
    for (long i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, appends, (void *)i) == 0);
    for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    int next[THREADS] = {0}, number, line;
    char text[17] = {0};
    for (int i = 0; i < THREADS * 300; i++) {
        CHECK(read(fd, text, 16) == 16);
        CHECK(sscanf(text, "%d %d\n", &number, &line) == 2);
        CHECK(line == next[number]++);
    }
    CHECK(read(fd, text, 16) == 0);
    CHECK(close(fd) == 0);
    done("appended");
}

/* Fds that are opened and closed in all threads at once. */
static void *opens(void *number) {
    char name[16];
    unsigned char byte, expected = (unsigned char)(long)number;
    snprintf(name, sizeof name, "own%ld", (long)number);
    for (int i = 0; i < 500; i++) {
        int fd = open(name, O_RDWR | O_CREAT, 0600);
        CHECK(fd >= 0);
        CHECK(write(fd, &expected, 1) == 1);
        int copy = dup(fd);
        CHECK(copy >= 0 && close(fd) == 0);
        CHECK(lseek(copy, 0, SEEK_CUR) == 1 && lseek(copy, 0, SEEK_SET) == 0);
        CHECK(read(copy, &byte, 1) == 1 && byte == expected);
        CHECK(close(copy) == 0);
    }
    return NULL;
}

static void numbers(void) {
    pthread_t threads[THREADS];
    for (long i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], NULL, opens, (void *)i) == 0);
    for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    done("numbers");
}

/* One thread closes an fd while another writes to it, and a duplicate stays open. Each write continues where the last one ended,
   or fails. */
static void *writes_on(void *number) {
    long written = 0;
    char record[RECORD];
    memset(record, 'w', sizeof record);
    for (;;) {
        ssize_t count = write((int)(long)number, record, RECORD);
        if (count < 0) {
            CHECK(errno == EBADF);
            return (void *)written;
        }
        CHECK(count == RECORD);
        written++;
    }
}

static void closed_beside(void) {
    char record[RECORD], found[RECORD];
    memset(record, 'f', sizeof record);
    for (int round = 0; round < 300; round++) {
        int fd = open("closed", O_RDWR | O_CREAT | O_TRUNC, 0600), copy;
        for (int i = 0; i < 20; i++) CHECK(write(fd, record, RECORD) == RECORD);
        CHECK((copy = dup(fd)) >= 0);
        pthread_t thread;
        void *written;
        CHECK(pthread_create(&thread, NULL, writes_on, (void *)(long)copy) == 0);
        for (volatile int delay = 0; delay < round * 997 % 100000; delay++)
            ;
        CHECK((round % 2 ? close_range(copy, copy, 0) : close(copy)) == 0);
        CHECK(pthread_join(thread, &written) == 0);
        CHECK(lseek(fd, 0, SEEK_CUR) == (20 + (long)written) * RECORD);
        CHECK(lseek(fd, 0, SEEK_END) == (20 + (long)written) * RECORD);
        for (int i = 0; i < 20; i++) {
            CHECK(pread(fd, found, RECORD, i * RECORD) == RECORD && memcmp(found, record, RECORD) == 0);
        }
        CHECK(close(fd) == 0);
    }
    done("closed beside");
}

static int ends[2];
static atomic_int cleaned;

static void cleans(void *unused) {
    (void)unused;
    cleaned++;
}

static void *waits(void *unused) {
    (void)unused;
    char byte;
    pthread_cleanup_push(cleans, NULL);
    read(ends[0], &byte, 1);
    pthread_cleanup_pop(0);
    return NULL;
}

static void *reads_on(void *unused) {
    (void)unused;
    unsigned char bytes[100];
    pthread_cleanup_push(cleans, NULL);
    for (;;) CHECK(pread(shared, bytes, sizeof bytes, 0) == sizeof bytes);
    pthread_cleanup_pop(0);
    return NULL;
}

static void cancelled(void) {
    CHECK(pipe(ends) == 0);
    shared = open("records", O_RDONLY);
    void *(*bodies[])(void *) = {waits, reads_on};
    for (int i = 0; i < 2; i++) {
        pthread_t thread;
        void *result;
        CHECK(pthread_create(&thread, NULL, bodies[i], NULL) == 0);
        CHECK(pthread_cancel(thread) == 0);
        CHECK(pthread_join(thread, &result) == 0);
        CHECK(result == PTHREAD_CANCELED);
    }
    done("cancelled");
    /* Once more, after a yield, so that the thread is probably in a call. */
    int before = cleaned;
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, reads_on, NULL) == 0);
    sched_yield();
    CHECK(pthread_cancel(thread) == 0 && pthread_join(thread, NULL) == 0);
    CHECK(cleaned == before || cleaned == before + 1);
}

int main(int argc, char **argv) {
    BEGIN;
    records();
    appended();
    numbers();
    closed_beside();
    cancelled();
    return 0;
}
