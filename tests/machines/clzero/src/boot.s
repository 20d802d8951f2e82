# From the BIOS to 64-bit mode: loads the rest of the image, maps the first GiB onto itself, enables SSE.

.section .boot, "awx"
.code16
.globl start
start:
    cli
    cld
    xor ax, ax
    mov ds, ax
    mov es, ax
    mov ss, ax
    mov sp, 0x7c00
    # The BIOS leaves the disk's number in DL.
    mov si, offset packet
    mov ah, 0x42
    int 0x13
    jc 9f
    in al, 0x92
    or al, 2
    out 0x92, al

    # Page tables at 0x1000: one entry, one entry, 512 pages of 2 MiB.
    mov edi, 0x1000
    xor eax, eax
    mov ecx, 0xc00
    rep stosd
    mov dword ptr [0x1000], 0x2003
    mov dword ptr [0x2000], 0x3003
    mov di, 0x3000
    mov eax, 0x83
    mov cx, 512
2:  mov dword ptr [di], eax
    add eax, 0x200000
    add di, 8
    loop 2b

    # PAE, OSFXSR, OSXMMEXCPT.
    mov eax, 0x620
    mov cr4, eax
    mov eax, 0x1000
    mov cr3, eax
    mov ecx, 0xc0000080
    rdmsr
    or eax, 0x100
    wrmsr
    lgdt [table_register]
    # PG, NE, MP, PE.
    mov eax, 0x80000023
    mov cr0, eax
    .byte 0xea
    .word long_mode, 8
9:  hlt
    jmp 9b

.code64
long_mode:
    mov eax, 0x10
    mov ds, eax
    mov es, eax
    mov ss, eax
    mov esp, 0x7c00
    call main
9:  hlt
    jmp 9b

.balign 8
table:
    .quad 0
    .quad 0x00209a0000000000
    .quad 0x0000920000000000
table_register:
    .word 23
    .long table
# 127 sectors from sector 1 on, to 0x7e00.
packet:
    .byte 16, 0
    .word 127, 0, 0x7e0
    .quad 1
.org 510
.word 0xaa55
