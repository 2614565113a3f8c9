//go:build !linux

package main

import "time"

var started = time.Now()

// threadTime is the wall clock where the thread's own time is not to be had.
func threadTime() time.Duration { return time.Since(started) }
