package main

import "golang.org/x/sys/windows"

// errNoSpace is what a full drive answers.
const errNoSpace = windows.ERROR_DISK_FULL
