// Package state keeps the record of what the program changed on this host and
// how to undo it, so that the next command (detach, the next attach, the
// guardian, the boot unit) can put it back. It is a leaf.
//
// The rule that everything rests on: a change is recorded, and the record is
// durable, before the change is made; it is forgotten only after it has been
// undone. An undo must therefore bear to find its change not yet made.
package state
