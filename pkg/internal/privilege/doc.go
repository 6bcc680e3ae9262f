// Package privilege looks at what this process may do. It is for Linux only.
package privilege
