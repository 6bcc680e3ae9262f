// Package peertest lets tests ask as other users.
package peertest
