/* Threads that fork while others make the process's first access to a file. No child waits for a thread that it does not have. */
#include "check.h"
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>

#define THREADS 6
#define ROUNDS 40
#define BYTES 20000
/* Seconds after which a thread certainly waits forever. */
#define LIMIT_S 60

static pthread_barrier_t begin;

/* Opens, reads and writes, as the first access of the process or a later one. */
static void accesses(int number) {
    char name[20];
    unsigned char bytes[3000];
    int fd = open("common", O_RDONLY);
    CHECK(fd >= 0);
    CHECK(pread(fd, bytes, sizeof bytes, 5000) == sizeof bytes && is_from(bytes, sizeof bytes, 5000));
    NEXT_ARE_FROM(fd, 0);
    CHECK(close(fd) == 0);
    snprintf(name, sizeof name, "own%d", number);
    fd = open(name, O_RDWR | O_CREAT, 0600);
    CHECK(fd >= 0);
    CHECK(pwrite(fd, bytes, 100, 10) == 100);
    CHECK(pread(fd, bytes, 100, 10) == 100 && is_from(bytes, 100, 5000));
    CHECK(close(fd) == 0);
}

static void *forks(void *argument) {
    int number = (int)(long)argument;
    pthread_barrier_wait(&begin);
    /* Some threads start at once, and some a little later, at a different moment each time. */
    struct timespec pause = {0, number % 3 * 30000};
    if (number >= 3) nanosleep(&pause, NULL);
    if (number % 2) accesses(number);
    pid_t child;
    /* Only fork opens malloc's locks for the child. */
    switch (number % 4) {
    case 1: child = _Fork(); break;
    case 2: child = syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0); break;
    default: child = fork();
    }
    if (child == 0) {
        /* The child does not inherit the alarm. */
        alarm(LIMIT_S);
        accesses(THREADS + number);
        _exit(0);
    }
    accesses(number);
    succeeded(child);
    return NULL;
}

static void round_of_threads(void) {
    alarm(LIMIT_S);
    pthread_t threads[THREADS];
    CHECK(pthread_barrier_init(&begin, NULL, THREADS) == 0);
    for (long i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, forks, (void *)i) == 0);
    for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
}

int main(int argc, char **argv) {
    BEGIN;
    if (argc > 2 && strcmp(argv[2], "round") == 0) {
        round_of_threads();
        return 0;
    }
    fill("common", BYTES);
    /* A process has only one first access, so this runs in a new process each time. */
    for (int round = 0; round < ROUNDS; round++) {
        pid_t child = fork();
        if (child == 0) {
            execl("/proc/self/exe", "forking", ".", "round", (char *)NULL);
            _exit(2);
        }
        succeeded(child);
    }
    done("forked");
    return 0;
}
