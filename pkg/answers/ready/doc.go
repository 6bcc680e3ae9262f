// Package ready turns a reply of a DNS server into one that others can be answered with, and judges whether it may be.
//
// It is pure: no clock, no state, nothing shared. What it makes is written into the kernel's map of answers, and user space
// makes its own replies of it, so that both say the same.
package ready
