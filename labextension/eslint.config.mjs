import js from '@eslint/js';
import prettier from 'eslint-config-prettier/flat';
import globals from 'globals';
import tseslint from 'typescript-eslint';

export default tseslint.config(
  { ignores: ['lib/', 'node_modules/'] },
  js.configs.recommended,
  {
    rules: {
      curly: ['error', 'all'],
      eqeqeq: 'error',
      'no-unneeded-ternary': 'error',
      'prefer-arrow-callback': 'error'
    }
  },
  {
    files: ['src/**/*.ts'],
    extends: [tseslint.configs.strictTypeChecked, tseslint.configs.stylisticTypeChecked],
    languageOptions: {
      globals: globals.browser,
      parserOptions: { projectService: true, tsconfigRootDir: import.meta.dirname }
    },
    rules: {
      '@typescript-eslint/no-confusing-void-expression': ['error', { ignoreArrowShorthand: true }],
      '@typescript-eslint/restrict-template-expressions': ['error', { allowNumber: true }],
      // It assumes that every array index is in range, so it reports necessary checks.
      '@typescript-eslint/no-unnecessary-condition': 'off',
      // JupyterLab's convention.
      '@typescript-eslint/naming-convention': [
        'error',
        { selector: 'interface', format: ['PascalCase'], custom: { regex: '^I[A-Z]', match: true } }
      ]
    }
  },
  {
    files: ['**/*.mjs', 'style/*.js'],
    languageOptions: { globals: globals.node }
  },
  prettier
);
