/* Stops in the middle of an inline write over several pages, when the second page of the write's buffer causes a SIGSEGV. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#define PAGE 4096

static char *pages;
static void handler(int signal)
{
	(void)signal;
	mprotect(pages + PAGE, PAGE, PROT_READ | PROT_WRITE);
	if (write(STDOUT_FILENO, "stopped\n", 8) == 8)
		for (;;)
			raise(SIGSTOP);
	_exit(7);
}

int main(int argc, char **argv)
{
	char byte;
	/* A stopped program would outlive the test. */
	if (argc != 2 || prctl(PR_SET_PDEATHSIG, SIGKILL) != 0)
		return 2;
	pages = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct sigaction action = {.sa_handler = handler};
	if (pages == MAP_FAILED || sigaction(SIGSEGV, &action, NULL) != 0)
		return 3;
	memset(pages, 'w', 2 * PAGE);
	int fd = open(argv[1], O_RDWR);
	for (int n = 0; n < 100; n++)
		if (pread(fd, &byte, 1, 0) != 1 || pwrite(fd, &byte, 1, 0) != 1)
			return 4;
	if (mprotect(pages + PAGE, PAGE, PROT_NONE) != 0)
		return 5;
	/* Repeats the write: a write through the kernel fails and does not stop the program. */
	for (int try = 0; try < 1000; try++)
		pwrite(fd, pages, 2 * PAGE, 0);
	return 6;
}
