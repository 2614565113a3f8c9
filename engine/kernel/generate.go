package kernel

//go:generate go run ./gen -what kernel -pkg kernel -out kernel_amd64.s -stubs stubs_amd64.go
//go:generate go run ./gen -what base -pkg main -out kernelbench/base_amd64.s -stubs kernelbench/base_amd64.go
