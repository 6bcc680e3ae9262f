// Package kernel holds one small end-to-end test that needs nothing but a kernel, root and the program itself: no tools,
// no other servers. `make test-kernel` runs it on an old kernel in a virtual machine, where the lab's tests can't run, and
// `make test-e2e` on this one.
package kernel
