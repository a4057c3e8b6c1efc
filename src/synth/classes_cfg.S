/* Embeds the presets of configs/, so that no preset exists twice in the source tree: fractaldb.bin as struct
 * ifs_list, the others as strings. The paths are relative to the repository root, where the compiler runs. */
	.section .rodata
.macro embed name, file
	.global \name
	.hidden \name
	.type \name, @object
\name:
	.incbin "\file"
	.byte 0
	.size \name, . - \name
.endm
	embed classes_cfg, "configs/classes.cfg"
	embed paper_1000_csv, "configs/paper_1000.csv"
	embed lowercompute_1000_csv, "configs/lowercompute_1000.csv"
	.balign 8
	embed fractaldb_bin, "configs/fractaldb.bin"
	.section .note.GNU-stack, "", @progbits
