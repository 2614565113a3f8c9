//go:build unix

package main

import "syscall"

// errNoSpace is what a full drive answers.
const errNoSpace = syscall.ENOSPC
